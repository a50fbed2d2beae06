"""The jobs of `doctor --deep`: one per kind of node that a run requests, one process per node."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path

import relax_hpc
from relax_hpc.cluster.slurm.container import (
    container_command,
    container_srun_options,
    role_python,
    write_container_file,
)
from relax_hpc.cluster.slurm.layout import Component, components
from relax_hpc.cluster.slurm.mpi import mpi_plugin, mpi_variables, needs_mpi
from relax_hpc.cluster.slurm.render import directive, gpu_options, render_environment
from relax_hpc.config.schema import Config
from relax_hpc.data.row_files import data_sets, folder_and_split
from relax_hpc.environments.tools import options_of
from relax_hpc.net.transport.choice import planes_wanted
from relax_hpc.ops.doctor.gpus import engine_roles
from relax_hpc.ops.doctor.probe import TOKEN
from relax_hpc.tasks.jails import jail_settings

MAX_NODES = 8
PROBE = ("-m", "relax_hpc.ops.doctor.probe")
_PLACING = ("partition", "account", "qos", "reservation", "constraint")
"""Options that decide on which nodes a job runs. A probe ignores the others."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A short job on one kind of node; its processes share the folder ``folder``."""

    groups: tuple[str, ...]
    nodes: int
    options: dict[str, str]
    folder: Path
    mpi: bool
    """Whether srun starts MPI ranks for these groups."""

    def make_folder(self) -> None:
        """Create the folder, readable by this user only."""
        make_probe_folder(self.folder)

    def script(self, config: Config) -> Path:
        """Write the batch script, which starts one process per node where roles would run.

        All values in it are quoted.
        """
        options = self.options | {
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            "time": "2",
            "job-name": "relax-doctor",
            "output": str(self.folder / "probe.log"),
        }
        lines = [f"#SBATCH {directive(name, value)}" for name, value in options.items()]
        exports = [
            f"export {name}={shlex.quote(value)}" for name, value in mpi_variables(config).items()
        ]
        exports.append(
            f"export PYTHONPATH={shlex.quote(str(self._code(config)))}${{PYTHONPATH:+:$PYTHONPATH}}"
        )
        plugin = mpi_plugin(config) if self.mpi else "none"
        command = ["srun", "--ntasks-per-node=1", "--export=ALL", f"--mpi={plugin}"]
        write_container_file(config, self.folder)
        command += container_srun_options(config, self.folder)
        command += container_command(config, self.folder)
        command += [role_python(config), *PROBE, *self._arguments(config)]
        path = self.folder / "probe.sbatch"
        prelude = render_environment(config).rstrip("\n")
        path.write_text(
            "\n".join(["#!/bin/bash", *lines, prelude, *exports, f"exec {shlex.join(command)}", ""])
        )
        return path

    def _code(self, config: Config) -> Path:
        """Folder of the toolkit's code for the probe; a container gets a copy in ``folder``."""
        source = Path(relax_hpc.__file__).parents[1]
        if config.site.container.runtime == "none":
            return source
        target = self.folder / "code"
        shutil.copytree(
            source / "relax_hpc", target / "relax_hpc", ignore=shutil.ignore_patterns("__pycache__")
        )
        return target

    def _arguments(self, config: Config) -> list[str]:
        """Command-line arguments of the probe's processes."""
        arguments = [
            f"--folder={self.folder}",
            f"--nodes={self.nodes}",
            f"--local_dir={config.site.local_dir}",
            f"--local_bytes={_staged_bytes(config)}",
            *plane_arguments(config),
        ]
        if self.mpi:
            arguments.append("--mpi")
        roles = set[str]()
        for name in self.groups:
            if name in config.groups:
                roles.update(config.groups[name].roles)
        if config.model.device == "cuda" and roles:
            arguments.append("--gpus")
            if roles & engine_roles(config):
                arguments.append("--engines")
        programs = {key: asdict(settings) for key, settings in jail_settings(config).items()}
        if "rollout" in roles and programs:
            arguments.append(f"--code={json.dumps(programs)}")
        arguments += ["--interfaces", *_interfaces(config)]
        paths = [f"{key}={path}" for key, path in _shared_paths(config).items()]
        return [*arguments, "--paths", *paths]


def plan_probes(config: Config, folder: Path) -> list[Probe]:
    """A probe for each kind of node.

    The largest kind gets at least two nodes, because nodes must see each other's files. A probe
    requests at most one GPU per node, so that it starts sooner.
    """
    kinds: dict[tuple[tuple[str, str], ...], list[Component]] = {}
    for component in components(config):
        options = {name: value for name, value in component.options.items() if name in _PLACING}
        options |= gpu_options(config, min(1, component.gpus_per_node), "")
        kinds.setdefault(tuple(options.items()), []).append(component)
    largest_kind = max(kinds, key=lambda kind: max(item.nodes for item in kinds[kind]))
    probes = []
    for number, (kind, members) in enumerate(kinds.items()):
        nodes = min(MAX_NODES, max(member.nodes for member in members))
        min_nodes = 2 if kind == largest_kind else 1
        groups = tuple(chain.from_iterable(member.groups for member in members))
        mpi = needs_mpi(config, *groups) and mpi_plugin(config) != "none"
        probes.append(Probe(groups, max(min_nodes, nodes), dict(kind), folder / str(number), mpi))
    return probes


def make_probe_folder(folder: Path) -> None:
    """Create a probe's folder, readable by this user only, and the token of its processes."""
    folder.mkdir(mode=0o700)
    (folder / TOKEN).write_bytes(secrets.token_bytes(32))


def plane_arguments(config: Config) -> list[str]:
    """Arguments of a probe that name the planes of the run."""
    return ["--planes", *(f"{plane}={mode}" for plane, mode in planes_wanted(config).items())]


def _staged_bytes(config: Config) -> int:
    """Bytes that are copied to each node's own disk, as far as this host can measure them."""
    nbytes = 0
    if config.model.path and "model" in config.site.stage:
        nbytes += _folder_bytes(Path(config.model.path))
    if config.site.python in ("", sys.executable) and "environment" in config.site.stage:
        nbytes += _folder_bytes(Path(sys.prefix))
    return nbytes


def _folder_bytes(folder: Path) -> int:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(file.stat().st_size for file in files)


def _interfaces(config: Config) -> list[str]:
    """Network interfaces on which the probes connect to each other, that of the site first."""
    names = [config.site.interface, *(group.interface for group in config.groups.values())]
    return list(dict.fromkeys(name for name in names if name))


def _shared_paths(config: Config) -> dict[str, str]:
    """Files and folders that every node must see, by their settings."""
    site, model = config.site, config.model
    image, library = site.container.image, site.mpi.library
    search = options_of("search", config.environment.options) or {}
    paths = {
        "model.path": model.path,
        "model.reference_path": model.reference_path,
        "model.teacher_path": model.teacher_path,
        "model.critic_path": model.critic_path,
        "genrm.path": config.genrm.path,
    }
    for rows in data_sets(config.data):
        paths[rows.setting] = str(folder_and_split(rows.path)[0])
    paths["environment.options.tools.search.corpus"] = search.get("corpus", "")
    if image.startswith("/") and site.container.runtime == "none":
        paths["site.container.image"] = image
    if library != "wheel":
        paths["site.mpi.library"] = library
    return {key: path for key, path in paths.items() if path}
