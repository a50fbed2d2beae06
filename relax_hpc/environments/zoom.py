"""The environment `zoom`: the policy looks at the pictures of its prompt again, a part of one or a
turned one, until it answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from relax_hpc.base.errors import ConfigError
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.source import Source
from relax_hpc.environments.base import Beginning, Observation
from relax_hpc.environments.tools.pictures import Rotate, Unit, Zoom, sources_of
from relax_hpc.environments.with_tools import WithTools


class ZoomIn(WithTools):
    """Zoom and rotate as in DeepEyes, and other tools beside them."""

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any] | None] | None = None,
        most_calls: int = 8,
        unit: Unit = "pixels",
        least_side: int = 28,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """``unit``: of boxes: pixels of the picture's file, or thousandths of its sides, as
        Qwen3-VL counts. ``least_side``: pixels of what is shown, at least. ``limits``: fields of
        `multimodal.limits.Limits`.

        ConfigError: one of them is not allowed.
        """
        super().__init__(tools or {}, most_calls)
        if unit not in get_args(Unit):
            raise ConfigError(
                f"environment.options.unit: found {unit!r}, allowed: {', '.join(get_args(Unit))}"
            )
        if not isinstance(least_side, int) or least_side < 1:
            raise ConfigError(
                f"environment.options.least_side: found {least_side!r}, allowed: pixels, at least 1"
            )
        self._unit, self._least = unit, least_side
        self._limits = _limits(limits or {})
        self._look_at([])

    def reset(self, beginning: Beginning) -> tuple[Observation, ...]:
        self._look_at(sources_of(beginning.media))
        return ()

    def _look_at(self, sources: Sequence[Source]) -> None:
        own = Zoom(sources, self._limits, self._unit, self._least), Rotate(sources, self._limits)
        self._tools |= {tool.name: tool for tool in own}


def _limits(wanted: Mapping[str, Any]) -> Limits:
    names = [field.name for field in dataclasses.fields(Limits)]
    if unknown := sorted(set(wanted).difference(names)):
        raise ConfigError(
            f"environment.options.limits: found {', '.join(unknown)}, allowed: {', '.join(names)}"
        )
    return Limits(**wanted)
