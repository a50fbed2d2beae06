"""Validation of samples: a run directory belongs to its user, who may have put anything there."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from relax_hpc.base.rundir import is_map
from relax_hpc.rollout.sample_index import is_valid
from relax_hpc.rollout.sample_log import Sample

Types = Mapping[str, type | tuple[type, ...]]
"""Types by the names of fields."""
_NONE = type(None)
_MEDIUM: Types = {"kind": str, "about": str, "picture": (str, _NONE)}
_CALL: Types = {**dict.fromkeys(("name", "error"), (str, _NONE)), "arguments": (dict, _NONE)}
_TURN: Types = {
    **dict.fromkeys(("by", "text"), str),
    "tokens": int,
    "trained": (int, _NONE),
    "versions": list,
    **dict.fromkeys(("media", "tool_calls"), (list, _NONE)),
}


def valid_samples(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples with all required fields, without optional fields of a wrong type."""
    for sample in samples:
        if is_valid(sample):
            valid = _valid_entries(sample, media=_MEDIUM, turns=_TURN)
            valid["components"] = _numbers(valid.get("components", {}))
            if "turns" in valid:
                valid["turns"] = [
                    _valid_entries(turn, media=_MEDIUM, tool_calls=_CALL) for turn in valid["turns"]
                ]
            yield valid


def _valid_entries(record: Sample, **lists: Types) -> Sample:
    """``record`` without null values.

    Of each field in ``lists`` only the entries with the given types are kept.
    """
    valid: Sample = {}
    for name, value in record.items():
        if value is not None and name not in lists:
            valid[name] = value
    for name, types in lists.items():
        entries = [entry for entry in record.get(name) or [] if is_map(entry, **types)]
        if entries:
            valid[name] = entries
    return valid


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among ``values``, the components of a reward."""
    return {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
