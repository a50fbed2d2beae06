"""Settings changed for one group of a living run: numbered layers over the run's configuration.

The group takes them when it starts next; the others keep what they have. A resume of the whole run
writes them into its config.yaml and retires them.
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
from relax_hpc.config.yaml_files import dump_yaml, read_yaml

RETIRED = ".retired"
_FILE = re.compile(r"(\d{6})-(.+)\.yaml")


def change_files(run: RunDir, group: str = "") -> list[Path]:
    """Layers for ``group``, oldest first; empty: all of them.

    A member of an elastic group has those of the whole group too.
    """
    found = [
        (match, path)
        for path in _folder(run).glob("*.yaml")
        if (match := _FILE.fullmatch(path.name))
    ]
    ordered = sorted(found, key=lambda item: item[0][1])
    return [path for match, path in ordered if not group or base_name(group, {match[2]})]


def add_change(
    run: RunDir,
    config: Config,
    group: str,
    files: Sequence[Path | str],
    overrides: Mapping[str, Any],
    judge: Callable[[Config], None] = lambda _: None,
) -> Path | None:
    """Keep ``files`` and ``overrides`` as a layer for ``group``; None if they say nothing.

    ``config`` is what the group has now; ``judge`` raises ConfigError if it does not like what the
    group would have. ConfigError, too, if the schema does not allow it or it concerns more than
    this group; then nothing is kept.
    """
    sources = compose(files, overrides).sources
    for key, source in sources.items():
        _check_own(key, source.at(key), config, group)
    if not sources:
        return None
    layer: dict[str, Any] = {}
    for raw, source in [
        *(read_yaml(Path(path)) for path in files),
        (_nested(overrides), COMMAND_LINE),
    ]:
        layer = _overlay(layer, clean(Config, raw, source))
    judge(build(Config, merge(Config, dataclasses.asdict(config), layer)))
    return write_numbered(_folder(run), f"-{group}.yaml", dump_yaml(layer).encode())


def retire_changes(run: RunDir) -> None:
    """Rename the files of changes, which stand in the run's own configuration now."""
    for path in change_files(run):
        path.rename(path.with_name(path.name + RETIRED))


def _check_own(key: str, place: str, config: Config, group: str) -> None:
    base = base_name(group, config.groups)
    entry = f"groups.{base}"
    if key in (entry, f"{entry}.roles"):
        raise ConfigError(
            f"{place}: {key}: the roles of a group are for the run's life; start a new run"
        )
    allowed = [
        entry,
        *(section for role in config.groups[base].roles for section in ROLES[role].sections),
    ]
    if not any(key == section or key.startswith(f"{section}.") for section in allowed):
        raise ConfigError(
            f"{place}: {key}: not of group {group} alone, allowed: {', '.join(sorted(allowed))}; "
            "other settings are the whole run's: stop it, and submit --resume with them"
        )


def _overlay(base: Mapping[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """``layer`` over ``base``; unlike `merge` it keeps a null, which takes something out of the
    run's configuration."""
    both = {
        k: _overlay(base[k], v)
        for k, v in layer.items()
        if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return {**base, **layer, **both}


def _nested(overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Nested maps of dotted keys: {"a": {"b": 1}} of {"a.b": 1}."""
    tree: dict[str, Any] = {}
    for key, value in overrides.items():
        for section in reversed(key.split(".")):
            value = {section: value}
        tree = _overlay(tree, value)
    return tree


def _folder(run: RunDir) -> Path:
    return run.root / "changes"
