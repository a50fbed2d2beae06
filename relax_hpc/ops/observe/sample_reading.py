"""Samples as a run directory has them; it is its user's, who may have put anything there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relax_hpc.base.rundir import is_map
from relax_hpc.rollout.sample_log import Sample

_NOTHING = type(None)
_ENTRIES = {
    **dict.fromkeys(("id", "prompt", "response", "finish_reason"), str),
    **dict.fromkeys(("reward", "step", "time"), (int, float)),
    **dict.fromkeys(("eval", "shard", "answer", "prompt_id"), (str, _NOTHING)),
    **dict.fromkeys(("tokens", "trained"), (int, _NOTHING)),
    **dict.fromkeys(("versions", "media", "turns"), (list, _NOTHING)),
    **dict.fromkeys(("components", "environment", "recording"), (dict, _NOTHING)),
}
"""Types of the fields that every sample has, and may have."""
_OF_MEDIUM = {"kind": str, "about": str, "picture": (str, _NOTHING)}
_OF_CALL = {**dict.fromkeys(("name", "error"), (str, _NOTHING)), "arguments": (dict, _NOTHING)}
_OF_TURN = {
    **dict.fromkeys(("by", "text"), str),
    "tokens": int,
    "trained": (int, _NOTHING),
    "versions": list,
    **dict.fromkeys(("media", "tool_calls"), (list, _NOTHING)),
}


def whole(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples that have what they must."""
    for sample in samples:
        if is_map(sample, **_ENTRIES) and math.isfinite(sample["reward"]):
            known = _sound(sample, media=_OF_MEDIUM, turns=_OF_TURN)
            turns = [
                _sound(turn, media=_OF_MEDIUM, tool_calls=_OF_CALL)
                for turn in known.get("turns", [])
            ]
            components = {"components": _numbers(known.get("components", {}))}
            yield known | components | ({"turns": turns} if turns else {})


def _sound(found: Sample, **lists: Mapping[str, Any]) -> Sample:
    """``found`` without what is null, with those entries of its ``lists`` that are of their
    kinds."""
    known = {
        name: value for name, value in found.items() if value is not None and name not in lists
    }
    kept = {
        name: [one for one in found.get(name) or [] if is_map(one, **kinds)]
        for name, kinds in lists.items()
    }
    return known | {name: entries for name, entries in kept.items() if entries}


def _numbers(found: Mapping[str, Any]) -> dict[str, float]:
    """Numbers among the components of a reward."""
    return {name: v for name, v in found.items() if isinstance(v, int | float) and math.isfinite(v)}
