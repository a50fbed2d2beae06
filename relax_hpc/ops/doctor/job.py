"""The jobs of `doctor --deep`: one for each kind of node that a run asks for, of a probe a node."""

from __future__ import annotations

import json
import secrets
import shlex
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import relax_hpc
from relax_hpc.cluster.slurm.container import container_command, container_srun_options, role_python
from relax_hpc.cluster.slurm.layout import Component, components
from relax_hpc.cluster.slurm.mpi import mpi_plugin, mpi_variables, with_ranks
from relax_hpc.cluster.slurm.render import directive, gpu_options, render_environment
from relax_hpc.config.schema import Config
from relax_hpc.data.row_files import data_sets, folder_and_split
from relax_hpc.environments.tools import options_of
from relax_hpc.net.transport.choice import planes_wanted
from relax_hpc.ops.checks.programs import programs_of
from relax_hpc.ops.doctor.gpus import engine_roles
from relax_hpc.ops.doctor.probe import TOKEN

MAX_NODES = 8
PROBE = ("-m", "relax_hpc.ops.doctor.probe")
_PLACING = ("partition", "account", "qos", "reservation", "constraint")
"""Options that decide where a job goes; the others are not a probe's."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A short job on nodes such as some components get; its probes meet in ``folder``."""

    groups: tuple[str, ...]
    nodes: int
    options: dict[str, str]
    folder: Path
    mpi: bool
    """Whether srun starts ranks of the groups that need it."""

    def make(self) -> None:
        """Make the folder, for nobody else."""
        make_folder(self.folder)

    def script(self, config: Config) -> Path:
        """The batch script: one probe a node, where the roles will run. Values are quoted, nothing
        else is in it."""
        own = {
            "nodes": str(self.nodes),
            "ntasks-per-node": "1",
            "time": "2",
            "job-name": "relax-doctor",
        }
        lines = [
            f"#SBATCH {directive(name, value)}" for name, value in (self.options | own).items()
        ]
        lines += [f"#SBATCH {directive('output', str(self.folder / 'probe.log'))}"]
        exports = [
            f"export {name}={shlex.quote(value)}" for name, value in mpi_variables(config).items()
        ]
        exports.append(
            f"export PYTHONPATH={shlex.quote(str(self._code(config)))}${{PYTHONPATH:+:$PYTHONPATH}}"
        )
        plugin = mpi_plugin(config) if self.mpi else "none"
        words = ["srun", "--ntasks-per-node=1", "--export=ALL", f"--mpi={plugin}"]
        words += [
            *container_srun_options(config, self.folder),
            *container_command(config, self.folder),
        ]
        words += [role_python(config), *PROBE, *self._words(config)]
        path = self.folder / "probe.sbatch"
        prelude = render_environment(config).rstrip("\n")
        path.write_text(
            "\n".join(["#!/bin/bash", *lines, prelude, *exports, f"exec {shlex.join(words)}", ""])
        )
        return path

    def _code(self, config: Config) -> Path:
        """Folder of the toolkit for the probes; a container sees a copy in their folder."""
        source = Path(relax_hpc.__file__).parents[1]
        if config.site.container.runtime == "none":
            return source
        target = self.folder / "code"
        shutil.copytree(
            source / "relax_hpc", target / "relax_hpc", ignore=shutil.ignore_patterns("__pycache__")
        )
        return target

    def _words(self, config: Config) -> list[str]:
        words = [
            f"--folder={self.folder}",
            f"--nodes={self.nodes}",
            f"--local_dir={config.site.local_dir}",
        ]
        words += [f"--local_bytes={_staged(config)}", *plane_words(config)]
        words += ["--mpi"] if self.mpi else []
        roles = {
            role
            for name in self.groups
            if name in config.groups
            for role in config.groups[name].roles
        }
        if config.model.device == "cuda" and roles:
            words += ["--gpus", *(["--engines"] if roles & engine_roles(config) else [])]
        draws = "rollout" in roles
        programs = {key: asdict(settings) for key, settings in programs_of(config).items()}
        words += [f"--code={json.dumps(programs)}"] if draws and programs else []
        words += ["--interfaces", *_interfaces(config)]
        return [*words, "--paths", *(f"{key}={path}" for key, path in _paths(config).items())]


def plan(config: Config, folder: Path) -> list[Probe]:
    """A probe for each kind of node; the largest component has at least two nodes looked at, as
    they must see each other. GPUs are asked for as the groups do, but one a node, which is free
    sooner."""
    kinds: dict[tuple[tuple[str, str], ...], list[Component]] = {}
    for part in components(config):
        options = {name: value for name, value in part.options.items() if name in _PLACING}
        options |= gpu_options(config, min(1, part.gpus_per_node), "")
        kinds.setdefault(tuple(options.items()), []).append(part)
    largest = max(kinds.values(), key=lambda parts: max(part.nodes for part in parts))
    found = []
    for number, (kind, parts) in enumerate(kinds.items()):
        nodes = min(MAX_NODES, max(part.nodes for part in parts))
        groups = tuple(group for part in parts for group in part.groups)
        least = 2 if parts is largest else 1
        mpi = with_ranks(config, *groups) and mpi_plugin(config) != "none"
        found.append(Probe(groups, max(least, nodes), dict(kind), folder / str(number), mpi))
    return found


def make_folder(folder: Path) -> None:
    """Make a folder in which probes meet, for nobody else."""
    folder.mkdir(mode=0o700)
    (folder / TOKEN).write_bytes(secrets.token_bytes(32))


def plane_words(config: Config) -> list[str]:
    return ["--planes", *(f"{plane}={mode}" for plane, mode in planes_wanted(config).items())]


def _staged(config: Config) -> int:
    """Bytes that are copied to each node's own disk, as far as they are known."""
    model = Path(config.model.path) if config.model.path and "model" in config.site.stage else None
    ours = config.site.python in ("", sys.executable) and "environment" in config.site.stage
    return (_bytes(model) if model else 0) + (_bytes(Path(sys.prefix)) if ours else 0)


def _bytes(folder: Path) -> int:
    return sum(
        path.stat().st_size
        for path in folder.rglob("*")
        if path.is_file() and not path.is_symlink()
    )


def _interfaces(config: Config) -> list[str]:
    """Interfaces of the nodes, the site's first, over which the probes call each other."""
    found = [config.site.interface, *(group.interface for group in config.groups.values())]
    return list(dict.fromkeys(name for name in found if name))


def _paths(config: Config) -> dict[str, str]:
    """Files and folders that every node must see, by their keys."""
    site = config.site
    inside = site.container.runtime != "none"
    search = options_of("search", config.environment.options) or {}
    found = {
        "model.path": config.model.path,
        "model.reference_path": config.model.reference_path,
        "model.teacher_path": config.model.teacher_path,
        "model.critic_path": config.model.critic_path,
        "genrm.path": config.genrm.path,
        **{rows.setting: str(folder_and_split(rows.path)[0]) for rows in data_sets(config.data)},
        "environment.options.tools.search.corpus": search.get("corpus", ""),
        "site.container.image": site.container.image
        if site.container.image.startswith("/") and not inside
        else "",
        "site.mpi.library": "" if site.mpi.library == "wheel" else site.mpi.library,
    }
    return {key: path for key, path in found.items() if path}
