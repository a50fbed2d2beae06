"""Command of a role in a container, at sites that run roles in containers. Supervisors run outside.

The options are from the documentation of Apptainer, Pyxis, the container engine of CSCS
(https://docs.cscs.ch/software/container-engine/edf/) and podman-hpc
(https://github.com/NERSC/podman-hpc, version 1.1.4, and `man podman-run`, version 4.3), read on
2026-11-27. Tests run those of podman-hpc with podman, and those of Apptainer with a test program
that makes real containers. Pyxis and the container engine were not tested.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.base.rundir import write_atomic
from relax_hpc.config.gpus import gpu_vendor
from relax_hpc.config.schema import Config

STARTED_BY_PROGRAM = ("apptainer", "podman-hpc")
"""Runtimes that a program starts; srun starts the others."""
EDF_FILE = "container.toml"
"""Environment definition file of a run, in its folder."""


def role_python(config: Config) -> str:
    """The Python interpreter of roles: the container's, the site's, or the present one."""
    site = config.site
    if site.container.runtime != "none":
        return site.container.python
    return site.python or sys.executable


def container_program(config: Config) -> str:
    """Program that starts a container; empty if srun starts it."""
    container = config.site.container
    if container.runtime not in STARTED_BY_PROGRAM:
        return ""
    return container.program or container.runtime


def container_command(config: Config, run_dir: Path) -> list[str]:
    """Arguments before a role's command that start its container; empty if srun starts it.

    ConfigError for pmix, because the container sees neither slurmd's PMIx folder nor the libmpi.so
    of the host.
    """
    container, launcher = config.site.container, config.site.mpi.launcher
    if container.runtime not in STARTED_BY_PROGRAM:
        return []
    if launcher == "pmix":
        raise ConfigError(
            f"site.mpi.launcher: found pmix with container runtime {container.runtime}, in which "
            "slurmd's PMIx is not visible; allowed: pmi2, with library: wheel (the mpich wheel in "
            "the image)"
        )
    if container.runtime == "podman-hpc":
        options = _podman_options(config, run_dir)
    else:
        options = _apptainer_options(config, run_dir)
    return [*_start_arguments(config), *options, *container.options, _image(config)]


def interpreter_command(config: Config, code: str) -> list[str]:
    """Command that runs ``code`` by the interpreter of the image, without the mounts of a run.
    Empty if only srun can start the container."""
    if not container_program(config):
        return []
    options = config.site.container.options
    return [*_start_arguments(config), *options, _image(config), role_python(config), "-c", code]


def _start_arguments(config: Config) -> list[str]:
    """Start of the command, with options that every container has.

    Those of podman-hpc give a container what one of Apptainer has without options: the namespaces
    of the host, because groups of a node share /dev/shm and look for each other by pid; the
    variables of the step, over which those of the image take precedence; and its limits.
    """
    if config.site.container.runtime != "podman-hpc":
        return [container_program(config), "exec", "--no-home"]
    host = ["--network=host", "--ipc=host", "--pid=host", "--env-host", "--ulimit=host"]
    # Nodes must not load an image that the submission has not seen. The log driver would write the
    # output of roles a second time, to the local disk.
    return [container_program(config), "run", "--rm", "--pull=never", "--log-driver=none", *host]


def _apptainer_options(config: Config, run_dir: Path) -> list[str]:
    options = [gpu_vendor(config).apptainer_option] if config.model.device == "cuda" else []
    return options + [f"--bind={mount}" for mount in mounts(config, run_dir)]


def _podman_options(config: Config, run_dir: Path) -> list[str]:
    options = [*gpu_vendor(config).podman_options] if config.model.device == "cuda" else []
    return options + [f"--volume={mount}" for mount in _mount_pairs(config, run_dir)]


def lacks_python(config: Config, output: str) -> bool:
    """Whether ``output`` says that the container has no interpreter of that name.

    Apptainer, podman and bubblewrap, and slurmd for pyxis and edf, name the program and one of two
    reasons on one line.
    """
    python = role_python(config)
    for line in output.splitlines():
        text = line.lower()
        if python in line and ("not found" in text or "no such file" in text):
            return True
    return False


def no_python_text(config: Config, output: str) -> str:
    """Error for a container without Python. ``output``: the output of its start."""
    last = " ".join(output.split())[-200:]
    return (
        f"site.container.python: found {role_python(config)}, which the image "
        f"{config.site.container.image} does not have ({last}); name the interpreter of the image "
        "that has relax_hpc's packages"
    )


def container_srun_options(config: Config, run_dir: Path) -> list[str]:
    """Options with which srun itself starts the role in a container, by the pyxis plugin or the
    container engine of CSCS; empty for other runtimes."""
    if config.site.container.runtime == "edf":
        return [f"--environment={run_dir / EDF_FILE}"]
    if config.site.container.runtime != "pyxis":
        return []
    return [
        f"--container-image={_image(config)}",
        f"--container-mounts={','.join(_mount_pairs(config, run_dir))}",
        "--no-container-mount-home",
    ]


def write_container_file(config: Config, run_dir: Path) -> None:
    """Write the environment definition file that `container_srun_options` names, which adds the
    mounts of the run to those of the image. Other runtimes need no file."""
    if config.site.container.runtime != "edf":
        return
    entries = _mount_pairs(config, run_dir)
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
    checks = (container_command, mounts, _check_options, lambda config, _: _image(config))
    for check in checks:
        with mistakes:
            check(config, run_dir)
    mistakes.raise_if_any()


def _check_options(config: Config, _run_dir: Path) -> None:
    container = config.site.container
    if container.options and container.runtime not in STARTED_BY_PROGRAM:
        raise ConfigError(
            f"site.container.options: found {container.options} with runtime {container.runtime}, "
            f"allowed with {' and '.join(STARTED_BY_PROGRAM)}; set site.srun_options"
        )


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
    if config.site.kernel_cache:
        folders.append(Path(config.site.kernel_cache))
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


def _mount_pairs(config: Config, run_dir: Path) -> list[str]:
    """Mounts as `/path:/inside`."""
    return [mount if ":" in mount else f"{mount}:{mount}" for mount in mounts(config, run_dir)]


def _image(config: Config) -> str:
    container = config.site.container
    if not container.image:
        raise ConfigError(
            f"site.container.image: found nothing with runtime {container.runtime}; name an image "
            "(env/relax_hpc.def builds one), or set site.container.runtime: none"
        )
    return container.image
