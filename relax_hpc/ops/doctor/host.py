"""Checks on this host without Slurm: settings, layout, programs and the run directory."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.container import (
    STARTED_BY_PROGRAM,
    container_program,
    interpreter_command,
    lacks_python,
    no_python_text,
    role_python,
)
from relax_hpc.cluster.slurm.mpi import mpi_variables, needs_mpi
from relax_hpc.cluster.slurm.program_output import run_program
from relax_hpc.cluster.slurm.render import render
from relax_hpc.config.groups import rank_count
from relax_hpc.config.schema import Config
from relax_hpc.net.kernel_caches.node import archive_folder
from relax_hpc.net.rendezvous.process import clean_environment
from relax_hpc.ops.checks.settings import check
from relax_hpc.ops.doctor.finding import Finding, error, warning

SHARED_TYPES = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "ceph",
    "panfs",
    "wekafs",
    "glusterfs",
    "afs",
    "cifs",
    "smb",
    "9p",
    "pvfs",
)
"""Prefixes of the types of filesystems that several hosts can mount."""
LOCAL_TYPES = ("tmpfs", "ramfs", "devtmpfs", "overlay")
"""Types of filesystems that exist on one host only."""
NEEDED_MODULES = ("relax_hpc", "mpi4py", "yaml", "jsonargparse", "psutil", "msgpack")
MAX_PATH = 1000
"""Bytes of the run directory's path. Names of files below it have up to 200 bytes, and a path in
Linux up to 4096; 1000 leaves a wide margin."""
MIN_FREE = 256 << 20
"""Free bytes for journal, logs and shards of a run with a tiny model. Checkpoints add to it."""
MIN_FILES = 20_000
IMPORT_TIMEOUT_S = 60.0
SETUP_TIMEOUT_S = 10.0
_LOAD_MPI = (
    "import mpi4py; mpi4py.rc.initialize = False; from mpi4py import MPI; "
    "print(MPI.Get_library_version())"
)
_FIND_MODULES = (
    "import importlib.util, json, sys; "
    "print(json.dumps([m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]))"
)


def check_settings(config: Config) -> Iterator[Finding]:
    """Findings of `relax-hpc check`, placeholders, and settings that contradict each other."""
    yield from map(error, check(config))
    yield from _placeholders(config)
    site = config.site
    yield from _setup_lines(site.setup)
    per_request, replicas = config.rollout.groups_per_request, config.rollout.replicas
    tickets = (config.max_staleness + 1) * config.prompts_per_step
    if replicas * per_request > tickets:
        yield warning(
            f"rollout.groups_per_request: found {per_request}, with {replicas} replicas "
            f"{replicas * per_request} concurrent prompt groups; the queue admits at most "
            f"{tickets} ((max_staleness + 1) * prompts_per_step), so engines will be idle; lower "
            "it, or raise max_staleness"
        )
    for name, group in config.groups.items():
        if group.resources.gpus_per_node and site.gpu_request == "none":
            yield warning(
                f"site.gpu_request: found none, so the {group.resources.gpus_per_node} GPUs per "
                f"node of groups.{name} are not requested; set gpus_per_node or gres"
            )
    if site.local_dir and not Path(site.local_dir).is_absolute():
        yield error(
            f"site.local_dir: found {site.local_dir!r}, allowed: an absolute path on a disk of the "
            "node"
        )
    # A folder that does not exist is created when a run is prepared.
    if site.kernel_cache and (
        not Path(site.kernel_cache).is_absolute() or Path(site.kernel_cache).exists()
    ):
        try:
            archive_folder(site.kernel_cache)
        except ConfigError as problem:
            yield error(str(problem))
        except OSError as problem:
            yield error(f"site.kernel_cache: {site.kernel_cache}: {problem.strerror}")


def _placeholders(config: Config) -> Iterator[Finding]:
    """Values that begin with YOUR, as in configs/sites, which the user has to replace."""
    site = config.site
    names = ("account", "partition", "hub_partition", "qos")
    values: dict[str, str | None] = {f"site.{name}": getattr(site, name) for name in names}
    for option, value in site.options.items():
        values[f"site.options.{option}"] = value
    for group_name, group in config.groups.items():
        for option, text in group.resources.options.items():
            values[f"groups.{group_name}.resources.options.{option}"] = text
    for key, setting in values.items():
        if setting and setting.startswith("YOUR"):
            yield error(f"{key}: found the placeholder {setting!r}; replace it with your value")


def _setup_lines(lines: list[str]) -> Iterator[Finding]:
    """Check the syntax with bash: an open quote would make the remaining batch script a string."""
    bash = shutil.which("bash", path=f"{os.environ.get('PATH', '')}:/bin")
    if not lines or not bash:
        return
    try:
        result = run_program([bash, "-nc", "\n".join(lines)], SETUP_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        yield warning(f"site.setup: not checked: {problem}")
        return
    if result.returncode:
        output = result.stderr.strip() or f"bash ended with code {result.returncode}"
        first_line = output.splitlines()[0]
        yield error(f"site.setup: bash cannot parse it: {first_line}; correct that line")


def check_layout(config: Config) -> Iterator[Finding]:
    """Check that the layout can be rendered, and warn about failures that it does not survive."""
    try:
        render(config)
    except ConfigError as problem:
        yield from map(error, problem.mistakes)
    if config.layout != "het":
        return
    if config.slurm.one_node_hub:
        yield warning(
            "slurm.one_node_hub: found true, so the failure of any node ends the whole job; remove "
            "it, or use layout: jobs"
        )
    if not config.slurm.successors:
        yield warning(
            "slurm.successors: found 0, so the run ends at its time limit or when the node of its "
            "batch script fails; set 1 or more"
        )
    if not config.site.sbatch_on_nodes:
        for name, group in config.groups.items():
            if name != "hub" and not group.spares and group.on_failure != "stop_run":
                severity = error if group.on_failure == "resubmit" else warning
                yield severity(
                    f"groups.{name}.spares: found 0 with site.sbatch_on_nodes false, so the group "
                    "gets no new nodes after a node fails; set spares: 1"
                )


def check_programs(config: Config) -> Iterator[Finding]:
    """Check the interpreter, the MPI library and the container."""
    yield from _interpreter(config)
    inside = config.site.container.runtime != "none"
    if config.layout != "local":
        yield from _mpi_library(config, inside)
        if not inside and needs_mpi(config, *config.groups):
            yield from _local_mpi(config)
    yield from _container(config)


def _interpreter(config: Config) -> Iterator[Finding]:
    python = config.site.python or sys.executable
    if shutil.which(python) is None:
        yield error(
            f"site.python: found {python!r}, which is not a program on this host; name the "
            "interpreter of the nodes"
        )
        return
    command = [python, "-c", _FIND_MODULES, *NEEDED_MODULES]
    try:
        done = run_program(command, IMPORT_TIMEOUT_S)
        missing = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        yield warning(
            f"site.python: {python} did not start within {IMPORT_TIMEOUT_S:g} s; check whether its "
            "filesystem is slow"
        )
        return
    except (OSError, ValueError):
        yield error(
            f"site.python: found {python!r}, allowed: Python 3.11 or newer; name an interpreter"
        )
        return
    if missing:
        yield error(
            f"site.python: {python} lacks {', '.join(missing)}; install relax-hpc in its "
            "environment"
        )


def _local_mpi(config: Config) -> Iterator[Finding]:
    """Check that mpi4py can load its MPI library on this host.

    The node check before a run and `--deep` test MPI itself on the nodes.
    """
    mpi, python = config.site.mpi, config.site.python or sys.executable
    key = f"site.mpi.library: found {mpi.library}"
    environment = clean_environment() | mpi_variables(config)
    try:
        result = run_program([python, "-c", _LOAD_MPI], IMPORT_TIMEOUT_S, environment)
    except (subprocess.TimeoutExpired, OSError):
        # `_interpreter` has reported the problem.
        return
    if result.returncode:
        tail = " ".join((result.stderr or result.stdout).split())[-200:]
        advice = (
            "install the package mpich next to mpi4py"
            if mpi.library == "wheel"
            else "name the libmpi.so of an MPI, or wheel"
        )
        yield error(f"{key}, which ranks cannot load ({tail}); {advice}")
    elif "Open MPI" in result.stdout and mpi.launcher == "pmi2":
        yield error(
            f"{key}, which is an Open MPI, with launcher pmi2; set site.mpi.launcher: pmix, or "
            "library: wheel"
        )


def _mpi_library(config: Config, inside: bool) -> Iterator[Finding]:
    launcher, library = config.site.mpi.launcher, config.site.mpi.library
    if library == "wheel" and launcher == "pmix":
        yield error(
            "site.mpi.library: found wheel with launcher pmix, which mpich does not support; use "
            "launcher pmi2, or name the libmpi.so of an Open MPI"
        )
    if library != "wheel" and inside:
        yield warning(f"site.mpi.library: {library!r} is in the image, which was not checked")
    elif library != "wheel" and not Path(library).is_file():
        yield error(
            f"site.mpi.library: found {library!r}, allowed: the path of a libmpi.so, or wheel"
        )
    elif library != "wheel":
        # The soname tells the two apart: libmpi.so.40 is Open MPI since version 3, and
        # libmpi.so.12 is the common ABI of MPICH, Intel MPI and MVAPICH.
        name = Path(library).resolve().name
        if launcher == "pmi2" and ".so.40" in name:
            yield error(
                f"site.mpi.launcher: found pmi2 with the Open MPI {library}, which needs launcher "
                "pmix"
            )
        if launcher == "pmix" and ".so.12" in name:
            yield warning(
                f"site.mpi.launcher: found pmix with {library}, an MPICH, which is untested; use "
                "pmi2"
            )
    for name, group in config.groups.items():
        ranked = [role for role in group.roles if rank_count(config, name, role) > 1]
        if launcher == "mpiexec" and ranked and config.layout != "local":
            ranks = rank_count(config, name, ranked[0])
            yield error(
                f"site.mpi.launcher: found mpiexec, but {ranked[0]} of groups.{name} has {ranks} "
                "ranks, allowed: 1; use pmix or pmi2"
            )


def _container(config: Config) -> Iterator[Finding]:
    runtime, image = config.site.container.runtime, config.site.container.image
    if runtime == "none":
        if image:
            yield warning(
                f"site.container.image: found {image!r} with runtime none, so it is not used; set "
                "site.container.runtime"
            )
        return
    # `check_layout` reports a missing image.
    if image.startswith(("/", ".")) and not os.access(image, os.R_OK):
        yield error(
            f"site.container.image: found {image!r}, which you cannot read; check its path and "
            "permissions"
        )
    elif image and not image.startswith(("/", ".")):
        yield warning(
            f"site.container.image: {image!r} is not a path; not checked whether it can be pulled"
        )
    if runtime not in STARTED_BY_PROGRAM:
        yield warning(
            f"site.container.runtime: {runtime} is untested, its options follow its "
            "documentation; run doctor --deep"
        )
        return
    program = container_program(config)
    if shutil.which(program) is None:
        yield warning(
            f"site.container.program: {program} is not on PATH of this host; load its module in "
            "site.modules"
        )
    elif image and "://" not in image and (image[0] not in "/." or os.access(image, os.R_OK)):
        yield from _container_python(config)


def _container_python(config: Config) -> Iterator[Finding]:
    """Start the interpreter of the image on this host. A login node may forbid containers; then
    the check of nodes finds out."""
    python, image = role_python(config), config.site.container.image
    command = interpreter_command(config, "import sys; print(sys.version_info >= (3, 11))")
    try:
        result = run_program(command, IMPORT_TIMEOUT_S)
    except (subprocess.TimeoutExpired, OSError) as problem:
        yield warning(
            f"site.container.image: {image} did not start on this host ({type(problem).__name__}); "
            "the check of nodes tries it again"
        )
        return
    output = result.stdout + result.stderr
    if result.returncode == 0 and result.stdout.split()[-1:] == ["False"]:
        yield error(
            f"site.container.python: found {python} in {image}, which is older than 3.11; allowed: "
            "Python 3.11 or newer"
        )
    elif result.returncode != 0 and lacks_python(config, output):
        yield error(no_python_text(config, output))
    elif result.returncode != 0:
        last = " ".join(output.split())[-200:]
        yield warning(
            f"site.container.image: {image} did not start on this host ({last}); the check of "
            "nodes tries it again"
        )


def check_disk(config: Config, several_hosts: bool) -> Iterator[Finding]:
    """Check filesystem, space and permissions of the run directory.

    ``several_hosts``: the cluster has more than one machine.
    """
    path = Path(config.run_dir)
    path_bytes = len(os.fsencode(path))
    if path_bytes > MAX_PATH:
        yield error(
            f"run_dir: found a path of {path_bytes} bytes, allowed: {MAX_PATH}; name a shorter one"
        )
        return
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    kind = filesystem(existing)
    if several_hosts and config.layout != "local" and not is_shared(kind):
        severity = error if kind in LOCAL_TYPES else warning
        yield severity(
            f"run_dir: found {existing} on {kind or 'an unknown filesystem'}, which other hosts "
            "may not see; name a directory on the cluster's shared filesystem (doctor --deep "
            "checks the nodes)"
        )
    if path.exists() and path.stat().st_uid != os.getuid():
        yield error(
            f"run_dir: found {path} of uid {path.stat().st_uid}, allowed: a directory of yours; "
            "name another directory"
        )
    mask = _umask()
    if mask & 0o700:
        yield error(
            f"umask: found {mask:04o}, which denies access to yourself; set umask 0077 or 0022"
        )
    yield from _disk_space(config, existing)


def _disk_space(config: Config, folder: Path) -> Iterator[Finding]:
    """Check the free bytes and inodes of the filesystem of ``folder``."""
    disk = os.statvfs(folder)
    free_bytes = disk.f_bavail * disk.f_frsize
    needed_bytes = max(MIN_FREE, _bytes_needed(config))
    if free_bytes < needed_bytes:
        yield error(
            f"run_dir: found {free_bytes / 2**30:.1f} GiB free in {folder}, allowed: at least "
            f"{needed_bytes / 2**30:.1f} GiB; free some, or lower checkpoint.keep_last"
        )
    if disk.f_files > 0 and disk.f_favail < MIN_FILES:
        yield error(
            f"run_dir: found {disk.f_favail} free inodes in {folder}, allowed: at least "
            f"{MIN_FILES}; free some"
        )


def filesystem(path: Path) -> str:
    """Type of the filesystem of ``path`` in the mount table; empty if the table has none."""
    real = path.resolve()
    kind, longest = "", -1
    for mount in psutil.disk_partitions(all=True):
        # If several filesystems are mounted at the same point, the last one is visible.
        if real.is_relative_to(mount.mountpoint) and len(mount.mountpoint) >= longest:
            kind, longest = mount.fstype, len(mount.mountpoint)
    return kind


def is_shared(kind: str) -> bool:
    """Whether several hosts can see a filesystem of this type."""
    return kind.removeprefix("fuse.").startswith(SHARED_TYPES)


def _umask() -> int:
    text = Path("/proc/self/status").read_text()
    match = re.search(r"^Umask:\s*([0-7]+)", text, re.MULTILINE)
    return int(match[1], 8) if match else 0


def _bytes_needed(config: Config) -> int:
    """Estimate of the bytes that a run writes, from those of the model's weights.

    A checkpoint has weights of 2 bytes per parameter, and float32 weights and two moments of 4
    bytes each: 7 times the weights. A new checkpoint is written before the oldest is removed.
    """
    if not config.model.path:
        return 0
    weights = sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
    return weights * (7 * (config.checkpoint.keep_last + 1) + 3)
