"""The environment `zoom`: until it answers, the policy can view parts of the pictures of its
prompt, and rotated pictures."""

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
    """The tools zoom and rotate of DeepEyes, and other tools."""

    def __init__(
        self,
        tools: Mapping[str, Mapping[str, Any] | None] | None = None,
        most_calls: int = 8,
        unit: Unit = "pixels",
        least_side: int = 28,
        limits: Mapping[str, Any] | None = None,
    ) -> None:
        """``unit``: unit of boxes: pixels of the picture's file, or thousandths of its sides, as in
        Qwen3-VL. ``least_side``: minimum side, in pixels, of a shown part. ``limits``: fields of
        `multimodal.limits.Limits`.

        ConfigError: an option is invalid.
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
        self._unit, self._min_side = unit, least_side
        self._limits = _limits(limits or {})
        self._set_pictures([])

    def reset(self, beginning: Beginning) -> tuple[Observation, ...]:
        self._set_pictures(sources_of(beginning.media))
        return ()

    def _set_pictures(self, sources: Sequence[Source]) -> None:
        zoom = Zoom(sources, self._limits, self._unit, self._min_side)
        rotate = Rotate(sources, self._limits)
        self._tools |= {zoom.name: zoom, rotate.name: rotate}


def _limits(values: Mapping[str, Any]) -> Limits:
    names = [field.name for field in dataclasses.fields(Limits)]
    unknown = sorted(set(values).difference(names))
    if unknown:
        raise ConfigError(
            f"environment.options.limits: found {', '.join(unknown)}, allowed: {', '.join(names)}"
        )
    return Limits(**values)
