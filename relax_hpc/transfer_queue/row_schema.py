"""Row schema, format version 1: what a sample carries between the roles.

A row is a dict of fields. Per-token arrays all have the length of the whole sequence, prompt and response, so index i
of every one of them belongs to token i: ``loss_mask[i]`` says whether token i was chosen by the policy and
``rollout_logprobs[i]`` is its log-probability given the tokens before it (0 on the prompt).
Unknown fields are kept and passed on; where their values are 1-d arrays of numbers, of any length but of one dtype, as
arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_hpc.fields import FIELDS, FieldSpec

FORMAT_VERSION = 1

Row = dict[str, Any]


class BadRow(ValueError):
    """Rows that may not enter the queue; the message names the field."""


def sample_id(ticket: int, k: int) -> str:
    """Id of sample ``k`` of a prompt group.

    >>> sample_id(123, 4)
    '000000123.04'
    """
    return f"{ticket:09d}.{k:02d}"


def spec_of(name: str, values: Sequence[Any]) -> FieldSpec:
    """What is known of field ``name``; of an unknown one, whether its ``values`` are arrays. BadRow: not of numbers."""
    if name in FIELDS:
        return FIELDS[name]
    if not values or not isinstance(values[0], np.ndarray):
        return FieldSpec("json", "object", "not in the schema")
    if values[0].dtype.kind not in "biuf":
        raise BadRow(f"{name}: found an array of {values[0].dtype}, allowed are integers, floats and bool")
    return FieldSpec("token", values[0].dtype.name, "not in the schema")


def lengths_of(name: str, dtype: str, values: Sequence[Any]) -> list[int]:
    """Entries of each array of the per-token field ``name``; BadRow if one is none, or not of its dtype."""
    expected = np.dtype(dtype)
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype != expected or value.ndim != 1:
            raise BadRow(_unfit(name, dtype, np.asarray(value)))
    return [len(value) for value in values]


def copy_column(name: str, spec: FieldSpec, values: Sequence[Any], memory: memoryview) -> None:
    """Write field ``name`` of several rows to the start of ``memory``, per-token arrays end to end.

    BadRow if the values may not enter the queue: wrong shape, out of range, NaN or infinite.
    """
    try:
        if spec.kind == "token":
            flat = np.frombuffer(memory, spec.dtype, sum(map(len, values)))
            np.concatenate(values, out=flat)
        else:
            found = np.array(values)
            if found.ndim != 1 or found.dtype.kind not in ("biuf" if spec.dtype.startswith("float") else "iu"):
                raise BadRow(_unfit(name, spec.dtype, found))
            flat = np.frombuffer(memory, spec.dtype, len(values))
            with np.errstate(over="ignore"):
                np.copyto(flat, found, casting="unsafe")
            if not spec.dtype.startswith("float") and not (whole := flat == found).all():
                raise BadRow(f"{name}: found {found[~whole][0]}, expected {spec.dtype}")
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, BadRow) else BadRow(f"{name}: {error}") from error
    if name in FIELDS and flat.dtype.kind == "f" and not (finite := np.isfinite(flat)).all():
        raise BadRow(f"{name}: found {flat[~finite][0]}, expected a finite {spec.dtype}")


def _unfit(name: str, dtype: str, found: np.ndarray) -> str:
    return f"{name}: found {found.dtype} with {found.ndim} dimensions, expected {dtype} with one"
