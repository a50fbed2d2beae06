"""Command of a role in a container, at sites that run roles in containers. Supervisors run outside.

The options of Apptainer, Pyxis and the container engine of CSCS are from their documentation
(https://docs.cscs.ch/software/container-engine/edf/, read on 2026-11-27). None of them was tested.
Tests run the options of Apptainer with a test program that makes real containers.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.base.rundir import write_atomic
from relax_hpc.config.gpus import gpu_vendor
from relax_hpc.config.schema import Config

EDF_FILE = "container.toml"
"""Environment definition file of a run, in its folder."""


def role_python(config: Config) -> str:
    """The Python interpreter of roles: the container's, the site's, or the present one."""
    site = config.site
    if site.container.runtime != "none":
        return site.container.python
    return site.python or sys.executable


def container_command(config: Config, run_dir: Path) -> list[str]:
    """Arguments before a role's command: a call of apptainer, or nothing.

    ConfigError for pmix, because the container sees neither slurmd's PMIx folder nor the libmpi.so
    of the host.
    """
    container, launcher = config.site.container, config.site.mpi.launcher
    if container.runtime != "apptainer":
        return []
    if launcher == "pmix":
        raise ConfigError(
            "site.mpi.launcher: found pmix with container runtime apptainer, in which slurmd's "
            "PMIx is not visible; allowed: pmi2, with library: wheel (the mpich wheel in the image)"
        )
    arguments = [container.program, "exec", "--no-home"]
    if config.model.device == "cuda":
        arguments.append(gpu_vendor(config).apptainer_option)
    arguments += [f"--bind={mount}" for mount in mounts(config, run_dir)]
    return [*arguments, _image(config)]


def container_srun_options(config: Config, run_dir: Path) -> list[str]:
    """Options with which srun itself starts the role in a container, by the pyxis plugin or the
    container engine of CSCS; empty for other runtimes."""
    if config.site.container.runtime == "edf":
        return [f"--environment={run_dir / EDF_FILE}"]
    if config.site.container.runtime != "pyxis":
        return []
    bound = ",".join(
        mount if ":" in mount else f"{mount}:{mount}" for mount in mounts(config, run_dir)
    )
    return [
        f"--container-image={_image(config)}",
        f"--container-mounts={bound}",
        "--no-container-mount-home",
    ]


def write_container_file(config: Config, run_dir: Path) -> None:
    """Write the environment definition file that `container_srun_options` names, which adds the
    mounts of the run to those of the image. Other runtimes need no file."""
    if config.site.container.runtime != "edf":
        return
    entries = [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts(config, run_dir)]
    # A JSON text without control characters is also a TOML basic string.
    lines = [f"base_environment = {json.dumps(_image(config))}", "mounts = ["]
    lines += [f"    {json.dumps(entry)}," for entry in entries]
    lines += ["]", f"workdir = {json.dumps(str(run_dir))}"]
    write_atomic(run_dir / EDF_FILE, "\n".join([*lines, ""]).encode())


def check_container(config: Config, run_dir: Path) -> None:
    """ConfigError with all reasons why roles cannot be started in a container."""
    if config.site.container.runtime == "none":
        return
    mistakes = Mistakes()
    for check in (container_command, mounts, lambda config, _: _image(config)):
        with mistakes:
            check(config, run_dir)
    mistakes.raise_if_any()


def _local_dir(config: Config) -> str:
    """The folder on the local disk of each node for caches and staged files."""
    # TMPDIR may differ between nodes and is then not mounted. Roles use this folder instead.
    return config.site.local_dir or "/tmp"


def data_paths(config: Config) -> list[str]:
    """Files and folders with rows that the configuration names."""
    data = config.data
    return [path for path in (data.train, *data.train_sets.values(), *data.eval.values()) if path]


def mounts(config: Config, run_dir: Path) -> list[str]:
    """Mounts, as `/path` or `/path:/inside`: the run directory, all paths in the configuration, and
    the mounts of the site.

    ConfigError for a path with `:` or `,`, which separate the entries in the lists of both
    runtimes.
    """
    model = config.model
    model_paths = (
        model.path,
        model.reference_path,
        model.teacher_path,
        model.critic_path,
        config.genrm.path,
    )
    folders = [
        run_dir,
        *(Path(path) for path in model_paths if path),
        *(Path(path).parent for path in data_paths(config)),
        Path(_local_dir(config)),
    ]
    paths = [str(folder.absolute()) for folder in folders]
    mistakes = Mistakes()
    for path in paths:
        if ":" in path or "," in path:
            mistakes.add(
                f"site.container.runtime: found {config.site.container.runtime} and the path "
                f"{path!r}, which it cannot mount: allowed are paths without : and ,"
            )
    for mount in config.site.container.mounts:
        if not mount.startswith("/") or "," in mount:
            mistakes.add(
                f"site.container.mounts: found {mount!r}, allowed: /path or /path:/inside, "
                "without ,"
            )
    mistakes.raise_if_any()
    return list(dict.fromkeys([*paths, *config.site.container.mounts]))


def _image(config: Config) -> str:
    container = config.site.container
    if not container.image:
        raise ConfigError(
            f"site.container.image: found nothing with runtime {container.runtime}; name an image "
            "(env/relax_hpc.def builds one), or set site.container.runtime: none"
        )
    return container.image
