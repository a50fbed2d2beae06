"""Settings that are changed for one group of a running run: numbered layers over its configuration.

The group reads them at its next start. Other groups keep their settings. A resume of the whole run
writes the changes into its config.yaml and retires the files.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir, write_numbered
from relax_hpc.config.groups import base_name
from relax_hpc.config.layer_validation import COMMAND_LINE, clean
from relax_hpc.config.load import build, compose, merge
from relax_hpc.config.roles import ROLES
from relax_hpc.config.schema import Config
from relax_hpc.config.yaml_files import Source, dump_yaml, read_yaml

RETIRED = ".retired"
_FILE = re.compile(r"(\d{6})-(.+)\.yaml")
"""Suffix of files whose changes are part of the run's configuration."""


def change_files(run: RunDir, group: str = "") -> list[Path]:
    """Return layers for ``group``, oldest first; without a group, all layers.

    A member of an elastic group also has the layers of the whole group.
    """
    numbered = []
    for path in _folder(run).glob("*.yaml"):
        match = _FILE.fullmatch(path.name)
        if match and (not group or base_name(group, {match[2]})):
            numbered.append((match[1], path))
    return [path for _, path in sorted(numbered, key=lambda item: item[0])]


def add_change(
    run: RunDir,
    config: Config,
    group: str,
    files: Sequence[Path | str],
    overrides: Mapping[str, Any],
    judge: Callable[[Config], None] = lambda _: None,
) -> Path | None:
    """Store ``files`` and ``overrides`` as a layer for ``group``. Return None if they set nothing.

    ``config`` is the group's present configuration. ``judge`` raises ConfigError if it refuses the
    new one. ConfigError is also raised if the schema refuses the layer, or if it changes a setting
    of other groups. Nothing is stored then.
    """
    sources = compose(files, overrides).sources
    for key, source in sources.items():
        _check_owner(key, source.at(key), config, group)
    if not sources:
        return None
    layer: dict[str, Any] = {}
    documents: list[tuple[Any, Source | str]] = [read_yaml(Path(path)) for path in files]
    documents.append((_nested(overrides), COMMAND_LINE))
    for raw, origin in documents:
        layer = _overlay(layer, clean(Config, raw, origin))
    judge(build(Config, merge(Config, dataclasses.asdict(config), layer)))
    return write_numbered(_folder(run), f"-{group}.yaml", dump_yaml(layer).encode())


def retire_changes(run: RunDir) -> None:
    """Rename the files of changes that are now part of the run's own configuration."""
    for path in change_files(run):
        path.rename(path.with_name(path.name + RETIRED))


def _check_owner(key: str, location: str, config: Config, group: str) -> None:
    """ConfigError: ``key`` is not a setting that concerns only ``group``."""
    base = base_name(group, config.groups)
    entry = f"groups.{base}"
    if key in (entry, f"{entry}.roles"):
        raise ConfigError(
            f"{location}: {key}: the roles of a group cannot change during a run; start a new run"
        )
    # A group applies its own copy of `profile`.
    allowed = [entry, "profile"]
    for role in config.groups[base].roles:
        allowed += ROLES[role].sections
    if not any(key == section or key.startswith(f"{section}.") for section in allowed):
        raise ConfigError(
            f"{location}: {key}: this setting does not belong to group {group} alone, allowed: "
            f"{', '.join(sorted(allowed))}; to change settings of the whole run, stop it and "
            "submit --resume with them"
        )


def _overlay(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``layer`` over ``base``. Unlike `merge` it keeps null, which removes something from
    the run's configuration."""
    both = {
        k: _overlay(base[k], v)
        for k, v in layer.items()
        if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return {**base, **layer, **both}


def _nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested maps from dotted keys: {"a": {"b": 1}} from {"a.b": 1}."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        for section in reversed(key.split(".")):
            value = {section: value}
        tree = _overlay(tree, value)
    return tree


def _folder(run: RunDir) -> Path:
    return run.root / "changes"
