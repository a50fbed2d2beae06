"""Classes of the built-in engines by kind, and the fields of rows that an engine class declares.

The configuration and the queue need the fields in processes that must not import an engine's
libraries.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from relax_hpc.base.fields import FieldSpec
from relax_hpc.base.plugins import load_plugin

KIND_KEY = "rollout.engine.kind"
ENGINE_CLASSES: Mapping[str, str] = {
    "sglang": "relax_hpc.rollout.engines.sglang.engine:SglangEngine",
    "transformers": "relax_hpc.rollout.engines.transformers_engine:TransformersEngine",
    "simulated": "relax_hpc.rollout.engines.simulated_engine:SimulatedEngine",
}
"""Kind of a built-in engine -> its class as `package.module:Class`."""
_FIELDS_IN_CLASS = re.compile(r"^[ \t]+fields\s*[:=]", re.MULTILINE)


def engine_class(kind: str) -> Any:
    """The class of engines of ``kind``. ConfigError: the kind is unknown."""
    return load_plugin(KIND_KEY, kind, ENGINE_CLASSES)


def declared_fields(kind: str) -> tuple[FieldSpec, ...]:
    """Fields that the engine class of ``kind`` declares in its attribute `fields`; empty for an
    unknown kind."""
    if ":" not in kind and not _may_declare_fields(kind):
        return ()
    return tuple(getattr(engine_class(kind), "fields", ()))


def _may_declare_fields(kind: str) -> bool:
    """Whether the module of a built-in engine assigns `fields` in a class.

    The source is searched first because importing `transformers_engine` imports torch, which takes
    seconds, and the hub and the commands do without it.
    """
    if kind not in ENGINE_CLASSES:
        return False
    module_name = ENGINE_CLASSES[kind].partition(":")[0]
    spec = importlib.util.find_spec(module_name)
    if spec is None or spec.origin is None:
        return False
    return _FIELDS_IN_CLASS.search(Path(spec.origin).read_text(encoding="utf-8")) is not None
