"""Findings without Slurm: settings, layout, programs and the run directory, seen from this host."""

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
from relax_hpc.cluster.slurm.mpi import mpi_variables, with_ranks
from relax_hpc.cluster.slurm.program_output import ask
from relax_hpc.cluster.slurm.render import render
from relax_hpc.config.groups import ranks_of
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.process import clean_environment
from relax_hpc.ops.checks.settings import check
from relax_hpc.ops.doctor.finding import Finding, error, warning

SHARED = (
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
"""Beginnings of the names of filesystems that several hosts see."""
MEMORY = ("tmpfs", "ramfs", "devtmpfs", "overlay")
"""Filesystems that no other host can see."""
NEEDED_MODULES = ("relax_hpc", "mpi4py", "yaml", "jsonargparse", "psutil", "msgpack")
MAX_PATH = 1000
"""Bytes of the run directory's path: files under it have names of up to some 200, and Linux allows
4096 in all."""
MIN_FREE = 256 << 20
"""Free bytes for journal, logs and shards of a run with a tiny model; larger ones need more by
their weights."""
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
    """Findings of `relax-hpc check`, and settings that defeat each other."""
    yield from map(error, check(config))
    site = config.site
    named = {
        f"site.{key}": getattr(site, key)
        for key in ("account", "partition", "hub_partition", "qos")
    }
    named |= {f"site.options.{name}": value for name, value in site.options.items()}
    for group, settings in config.groups.items():
        options = settings.resources.options.items()
        named |= {f"groups.{group}.resources.options.{name}": value for name, value in options}
    for key, value in named.items():
        if value.startswith("YOUR"):
            yield error(f"{key}: found the placeholder {value!r}; set it to yours")
    yield from _setup(site.setup)
    tickets = (config.max_staleness + 1) * config.prompts_per_step
    wanted = config.rollout.replicas * config.rollout.groups_per_request
    if wanted > tickets:
        yield warning(
            f"rollout.groups_per_request: found {config.rollout.groups_per_request}, with "
            f"{config.rollout.replicas} "
            f"replicas {wanted} prompt groups at once; the queue hands out at most {tickets} "
            "((max_staleness + 1) * "
            "prompts_per_step), so engines will idle; lower it, or raise max_staleness"
        )
    for name, group in config.groups.items():
        if group.resources.gpus_per_node and site.gpu_request == "none":
            yield warning(
                f"site.gpu_request: found none, so the {group.resources.gpus_per_node} GPUs a "
                f"node of groups.{name} are not asked for; set gpus_per_node or gres"
            )
    if site.local_dir and not Path(site.local_dir).is_absolute():
        yield error(
            f"site.local_dir: found {site.local_dir!r}, allowed: an absolute path on each node's "
            "own disk"
        )


def _setup(lines: list[str]) -> Iterator[Finding]:
    """Whether bash can read them: a quote that is not closed would take the rest of the batch
    script with it."""
    bash = shutil.which("bash", path=f"{os.environ.get('PATH', '')}:/bin")
    if not lines or not bash:
        return
    try:
        done = ask([bash, "-nc", "\n".join(lines)], SETUP_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired) as problem:
        yield warning(f"site.setup: not checked: {problem}")
        return
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"it ended with code {done.returncode}"]
        yield error(f"site.setup: bash cannot read it: {said[0]}; mend that line")


def check_layout(config: Config) -> Iterator[Finding]:
    """Findings on whether the layout can be rendered, and what it cannot survive."""
    try:
        render(config)
    except ConfigError as problem:
        yield from map(error, problem.mistakes)
    if config.layout != "het":
        return
    if config.slurm.one_node_hub:
        yield warning(
            "slurm.one_node_hub: found true, so the death of any node ends the whole job; leave "
            "it out, or take layout: jobs"
        )
    if not config.slurm.successors:
        yield warning(
            "slurm.successors: found 0, so the run ends at its time limit or with its head; set 1 "
            "or more"
        )
    if not config.site.sbatch_on_nodes:
        for name, group in config.groups.items():
            if name != "hub" and not group.spares and group.on_failure != "stop_run":
                found = error if group.on_failure == "resubmit" else warning
                yield found(
                    f"groups.{name}.spares: found 0 with site.sbatch_on_nodes false, so it cannot "
                    "get new nodes after losing one; set spares: 1"
                )


def check_programs(config: Config) -> Iterator[Finding]:
    """Findings on the interpreter, the MPI library and the container."""
    yield from _interpreter(config)
    inside = config.site.container.runtime != "none"
    if config.layout != "local":
        yield from _mpi(config, inside)
        if not inside and with_ranks(config, *config.groups):
            yield from _mpi_here(config)
    yield from _container(config)


def _interpreter(config: Config) -> Iterator[Finding]:
    python = config.site.python or sys.executable
    if shutil.which(python) is None:
        yield error(
            f"site.python: found {python!r}, which is no program here; name the interpreter of the "
            "nodes"
        )
        return
    command = [python, "-c", _FIND_MODULES, *NEEDED_MODULES]
    try:
        done = ask(command, IMPORT_TIMEOUT_S)
        missing = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        yield warning(
            f"site.python: {python} did not start within {IMPORT_TIMEOUT_S:g} s; is its filesystem "
            "slow?"
        )
        return
    except (OSError, ValueError):
        yield error(
            f"site.python: found {python!r}, which is no Python 3.11 or newer; name another"
        )
        return
    if missing:
        yield error(
            f"site.python: {python} has no {', '.join(missing)}; install relax-hpc in its "
            "environment"
        )


def _mpi_here(config: Config) -> Iterator[Finding]:
    """Whether mpi4py can load its library on this host; MPI itself is tried on the nodes (--deep,
    and pre-flight)."""
    mpi, python = config.site.mpi, config.site.python or sys.executable
    key, environment = (
        f"site.mpi.library: found {mpi.library}",
        clean_environment() | mpi_variables(config),
    )
    try:
        done = ask([python, "-c", _LOAD_MPI], IMPORT_TIMEOUT_S, environment)
    except (subprocess.TimeoutExpired, OSError):
        # What is wrong with the interpreter has been said.
        return
    if done.returncode:
        last = " ".join((done.stderr or done.stdout).split())[-200:]
        advice = (
            "install mpich beside mpi4py"
            if mpi.library == "wheel"
            else "name the libmpi.so of an MPI, or wheel"
        )
        yield error(f"{key}: ranks cannot begin MPI with it ({last}); {advice}")
    elif "Open MPI" in done.stdout and mpi.launcher == "pmi2":
        yield error(
            f"{key}, which is an Open MPI, with launcher pmi2; set site.mpi.launcher: pmix, or "
            "library: wheel"
        )


def _mpi(config: Config, inside: bool) -> Iterator[Finding]:
    launcher, library = config.site.mpi.launcher, config.site.mpi.library
    if library == "wheel" and launcher == "pmix":
        yield error(
            "site.mpi.library: found wheel with launcher pmix, which mpich does not speak; take "
            "launcher pmi2, or name the libmpi.so of an Open MPI"
        )
    if library != "wheel" and inside:
        yield warning(f"site.mpi.library: {library!r} is in the image, where it was not looked for")
    elif library != "wheel" and not Path(library).is_file():
        yield error(
            f"site.mpi.library: found {library!r}, which is not a file; name a libmpi.so, or wheel"
        )
    elif library != "wheel":
        # Open MPI's library has been libmpi.so.40 since its version 3, the ABI that MPICH's kin
        # share is .so.12.
        name = Path(library).resolve().name
        if launcher == "pmi2" and ".so.40" in name:
            yield error(
                f"site.mpi.launcher: found pmi2 with the Open MPI {library}, which needs launcher "
                "pmix"
            )
        if launcher == "pmix" and ".so.12" in name:
            yield warning(
                f"site.mpi.launcher: found pmix with {library}, an MPICH; untried, pmi2 is what it "
                "speaks"
            )
    for name, group in config.groups.items():
        ranked = [role for role in group.roles if ranks_of(config, name, role) > 1]
        if launcher == "mpiexec" and ranked and config.layout != "local":
            ranks = ranks_of(config, name, ranked[0])
            yield error(
                f"site.mpi.launcher: found mpiexec, but {ranked[0]} of groups.{name} has {ranks} "
                "ranks, allowed: 1; take pmix or pmi2"
            )


def _container(config: Config) -> Iterator[Finding]:
    runtime, image = config.site.container.runtime, config.site.container.image
    if runtime == "none":
        if image:
            yield warning(
                f"site.container.image: found {image!r} with runtime none, so it is not used; set "
                "runtime"
            )
        return
    # Without any nothing is rendered, which says so.
    if image.startswith(("/", ".")) and not os.access(image, os.R_OK):
        yield error(
            f"site.container.image: found {image!r}, which you cannot read; check its path and "
            "permissions"
        )
    elif image and not image.startswith(("/", ".")):
        yield warning(
            f"site.container.image: {image!r} is no path here, so whether it can be pulled was not "
            "checked"
        )
    yield warning(
        f"site.container.runtime: {runtime} is untried, its words are from its documentation; try "
        "--deep"
    )
    program = config.site.container.program
    if runtime == "apptainer" and shutil.which(program) is None:
        yield warning(
            f"site.container.program: {program} is not on PATH here; load its module in "
            "site.modules"
        )


def check_disk(config: Config, several_hosts: bool) -> Iterator[Finding]:
    """The run directory's filesystem, space and rights; ``several_hosts``: the cluster is more than
    one machine."""
    path = Path(config.run_dir)
    if len(os.fsencode(path)) > MAX_PATH:
        yield error(
            f"run_dir: found a path of {len(os.fsencode(path))} bytes, allowed: {MAX_PATH}; take a "
            "shorter one"
        )
        return
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    kind = filesystem(existing)
    if several_hosts and config.layout != "local" and not shared(kind):
        say = error if kind in MEMORY else warning
        yield say(
            f"run_dir: {existing} is on {kind or 'an unknown filesystem'}, which other hosts may "
            "not see; name a "
            "directory on the cluster's shared filesystem (doctor --deep looks from the nodes)"
        )
    if path.exists() and path.stat().st_uid != os.getuid():
        yield error(
            f"run_dir: {path} belongs to uid {path.stat().st_uid}, not to you; name another "
            "directory"
        )
    mask = _umask()
    if mask & 0o700:
        yield error(
            f"umask: found {mask:04o}, which takes rights from yourself; set umask 0077 or 0022"
        )
    room = os.statvfs(existing)
    needed = max(MIN_FREE, _bytes_needed(config))
    if room.f_bavail * room.f_frsize < needed:
        yield error(
            f"run_dir: {existing} has {room.f_bavail * room.f_frsize / 2**30:.1f} GiB free, the "
            f"run needs about {needed / 2**30:.1f}; free some, or lower checkpoint.keep_last"
        )
    if room.f_files > 0 and room.f_favail < MIN_FILES:
        yield error(
            f"run_dir: {existing} has {room.f_favail} inodes left, allowed: at least {MIN_FILES}; "
            "free some"
        )


def filesystem(path: Path) -> str:
    """Type of the filesystem that ``path`` is on, as the mount table names it; empty if it does not
    say."""
    real = path.resolve()
    found = [
        part for part in psutil.disk_partitions(all=True) if real.is_relative_to(part.mountpoint)
    ]
    # Of mounts over one another the last counts.
    return (
        max(enumerate(found), key=lambda one: (len(one[1].mountpoint), one[0]))[1].fstype
        if found
        else ""
    )


def shared(kind: str) -> bool:
    """Whether several hosts can see a filesystem of this type."""
    return kind.removeprefix("fuse.").startswith(SHARED)


def _umask() -> int:
    text = Path("/proc/self/status").read_text()
    found = re.search(r"^Umask:\s*([0-7]+)", text, re.MULTILINE)
    return int(found[1], 8) if found else 0


def _bytes_needed(config: Config) -> int:
    """Checkpoints hold weights, float32 masters and two moments; one more is written before the
    oldest goes."""
    weights = (
        sum(file.stat().st_size for file in Path(config.model.path).glob("*.safetensors"))
        if config.model.path
        else 0
    )
    return weights * (7 * (config.checkpoint.keep_last + 1) + 3)
