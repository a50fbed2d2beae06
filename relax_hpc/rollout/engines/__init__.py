"""Inference engines, each of which answers requests; `make_engine` creates one by its kind.

A plug-in is `package.module:Class` in `rollout.engine.kind`: a class with the methods of
`engine.Engine`, which is called with the arguments of `make_engine`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.base.engine_classes import KIND_KEY, engine_class
from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS

if TYPE_CHECKING:
    from relax_hpc.base.versions import Version
    from relax_hpc.config.schema import Config
    from relax_hpc.rollout.engines.engine import Engine


def make_engine(
    config: Config,
    number: int,
    model_dir: Path,
    version: Version,
    log_dir: Path,
    local_number: int | None = None,
) -> Engine:
    """The engine of the kind `config.rollout.engine.kind`, not started.

    ``model_dir`` has the weights of ``version``. ``number`` is the engine's number in its group.
    ``local_number`` is its number on its node, which determines its GPUs; the default is
    ``number``. ConfigError: the kind is unknown.
    """
    kind = config.rollout.engine.kind
    engine = engine_class(kind)
    _check_fields_are_declared(kind, engine)
    if local_number is None:
        local_number = number
    return engine(config, number, model_dir, version, log_dir, local_number)


def _check_fields_are_declared(kind: str, engine: type) -> None:
    """ConfigError if the fields of a built-in class were not declared when the configuration was
    loaded: `declared_fields` reads only the class body."""
    fields = getattr(engine, "fields", ())
    undeclared = [spec.name for spec in fields if spec.name not in FIELDS]
    if undeclared and ":" not in kind:
        raise ConfigError(
            f"{KIND_KEY}: {kind}: found fields {', '.join(undeclared)} that "
            f"{engine.__name__} inherits, allowed: fields that its own class body assigns; "
            "assign `fields` there"
        )
