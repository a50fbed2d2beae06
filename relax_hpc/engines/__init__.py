"""Inference engines: one request, one answer; `make_engine` finds them by the name of their kind.

One's own is `package.module:Class` in `rollout.engine.kind`: a class as `engine.Engine`, made with the arguments of
`make_engine`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.engines.kinds import engine_class

if TYPE_CHECKING:
    from relax_hpc.config.schema import Config
    from relax_hpc.engines.engine import Engine
    from relax_hpc.versions import Version


def make_engine(
    config: Config, number: int, model_dir: Path, version: Version, log_dir: Path, place: int | None = None
) -> Engine:
    """The engine that `config.rollout.engine.kind` names, not started. `model_dir` holds the weights of `version`.

    ``number``: of the engine in its group. ``place``: its number among those of its node, by which it finds its GPUs;
    ``number`` if left out. ConfigError: there is no such kind.
    """
    made = engine_class(config.rollout.engine.kind)
    return made(config, number, model_dir, version, log_dir, number if place is None else place)
