"""Words before a role's command where the site runs roles in containers; supervision stays outside.

The words of Apptainer and Pyxis are from their documentation: neither has been tried. Tests run
those of Apptainer with a program of their own that makes real containers.
"""

from __future__ import annotations

import sys
from pathlib import Path

from relax_hpc.base.errors import ConfigError, Mistakes
from relax_hpc.config.schema import Config


def role_python(config: Config) -> str:
    """The interpreter that starts a role: the container's, the site's, or this one."""
    site = config.site
    return (
        site.container.python if site.container.runtime != "none" else site.python or sys.executable
    )


def container_command(config: Config, run_dir: Path) -> list[str]:
    """Words before a role's command: those of apptainer, or none.

    ConfigError for pmix: slurmd's folder of it is not seen inside, nor is a libmpi.so of the host.
    """
    container, launcher = config.site.container, config.site.mpi.launcher
    if container.runtime != "apptainer":
        return []
    if launcher == "pmix":
        raise ConfigError(
            "site.mpi.launcher: found pmix with container runtime apptainer, where slurmd's PMIx "
            "is out of reach; allowed: pmi2, with library: wheel (the mpich wheel in the image)"
        )
    words = [container.program, "exec", "--no-home"]
    if config.model.device == "cuda":
        words.append("--nv")
    for mount in mounts(config, run_dir):
        words.append(f"--bind={mount}")
    return [*words, _image(config)]


def container_srun_options(config: Config, run_dir: Path) -> list[str]:
    """Options that have srun itself start the role in a container, by the pyxis plugin; else
    none."""
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


def check_container(config: Config, run_dir: Path) -> None:
    """ConfigError with everything for which roles could not be started in a container."""
    if config.site.container.runtime == "none":
        return
    mistakes = Mistakes()
    for look in (container_command, mounts, lambda config, _: _image(config)):
        with mistakes:
            look(config, run_dir)
    mistakes.raise_if_any()


def _local_dir(config: Config) -> str:
    """The folder on each node's own disk that caches and staged files lie under."""
    # TMPDIR may be another one on each node: what is not mounted is not there, and a role then
    # takes this one.
    return config.site.local_dir or "/tmp"


def data_paths(config: Config) -> list[str]:
    """Files and folders of rows that the configuration names."""
    data = config.data
    return [path for path in (data.train, *data.train_sets.values(), *data.eval.values()) if path]


def mounts(config: Config, run_dir: Path) -> list[str]:
    """`/path` or `/path:/inside` for the run directory, every path that the configuration names,
    and the site's own.

    ConfigError for a path that no container runtime can be told of: `:` and `,` part the lists they
    read.
    """
    data = [Path(path).parent for path in data_paths(config)]
    model = config.model
    named = (
        model.path,
        model.reference_path,
        model.teacher_path,
        model.critic_path,
        config.genrm.path,
    )
    models = [Path(path) for path in named if path]
    named = [str(path.absolute()) for path in (run_dir, *models, *data, Path(_local_dir(config)))]
    mistakes = Mistakes()
    for path in named:
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
    return list(dict.fromkeys([*named, *config.site.container.mounts]))


def _image(config: Config) -> str:
    container = config.site.container
    if not container.image:
        raise ConfigError(
            f"site.container.image: found nothing with runtime {container.runtime}; name an image "
            "(env/relax_hpc.def builds one), or set site.container.runtime: none"
        )
    return container.image
