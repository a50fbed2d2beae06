"""Configuration files that come with the package, which commands find by a short name.

`--config quickstart` is `configs/runs/quickstart.yaml` of the installed package or the checkout.
"""

from __future__ import annotations

import difflib
import functools
from pathlib import Path

import relax_hpc
from relax_hpc.base.errors import ConfigError

_FOLDERS = ("runs", "clusters", "groups", "sites", "algorithms")
_SUFFIXES = (".yaml", ".yml", ".json")


def configs_folder() -> Path:
    """Folder `configs`: in the installed package, or else in the checkout."""
    package = Path(str(relax_hpc.__file__)).resolve().parent
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


@functools.cache
def packaged_configs() -> dict[str, Path]:
    """Path of each packaged configuration file by its short name."""
    folder = configs_folder()
    paths: dict[str, Path] = {}
    for name in _FOLDERS:
        paths |= {path.stem: path for path in sorted((folder / name).glob("*.yaml"))}
    return paths


def find_config(name: str | Path) -> Path:
    """The file that ``name`` stands for: a path, or the short name of a packaged file.

    A name is a path if it has a slash or ends in .yaml, .yml or .json, or if no packaged file but a
    file in the working directory has it. ConfigError: it is an unknown short name.
    """
    path = Path(name)
    if "/" in str(name) or path.suffix in _SUFFIXES:
        return path
    packaged = packaged_configs()
    if str(name) in packaged:
        return packaged[str(name)]
    if path.exists():
        return path
    close = difflib.get_close_matches(str(name), packaged, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(
        f"--config: found {str(name)!r}, allowed: the path of a YAML file (with a slash or "
        f".yaml), or one of the packaged {', '.join(packaged)}{hint}"
    )


def find_model(path: str) -> str:
    """Path of the model that ``path`` stands for: itself, or a packaged config.json's folder.

    A folder of that name in the working directory comes first.
    """
    packaged = configs_folder() / "models" / path
    if path in ("", ".", "..") or "/" in path or Path(path).exists() or not packaged.is_dir():
        return path
    return str(packaged)
