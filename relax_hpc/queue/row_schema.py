"""Row schema, format version 2: the fields of a training sequence.

A row is a dict of fields. Per-token arrays have the length of the whole sequence, prompt and
response. Index i of each of them belongs to token i: ``loss_mask[i]`` says whether the policy
sampled token i, and ``rollout_logprobs[i]`` is its log-probability given the tokens before it. An
episode, one attempt at a prompt, has one row or several; its reward is in each of them.

Unknown fields are kept. Their values are stored as arrays if they are arrays of numbers that have
one dtype and one shape after the first axis; the lengths may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from relax_hpc.base.fields import FIELDS, FieldSpec, fields_by
from relax_hpc.queue.row_ids import parse_row_id

FORMAT_VERSION = 2
NO_VERSION = 0
"""Encoded version, of no incarnation, of tokens that no policy sampled: those of the prompt, and
those that others, such as a tool, added between turns. Their mask and log-probabilities are 0."""
_ONLY_NO_VERSION = frozenset((NO_VERSION,))
_LONG = 4096
"""Length of a row above which numpy's reductions are faster than comparing bytes."""

Row = dict[str, Any]


class BadRow(ValueError):
    """Rows that the queue rejects; the message names the field."""


def nest_rows(rows: Sequence[Row]) -> list[list[list[Row]]]:
    """``rows``, in the order of their ids, as [prompt group][episode][row]."""
    prompts: list[list[list[Row]]] = []
    previous: tuple[int, ...] = ()
    for row in rows:
        key = parse_row_id(row["row_id"])
        if key[:1] != previous[:1]:
            prompts.append([])
        if key[:2] != previous[:2]:
            prompts[-1].append([])
        prompts[-1][-1].append(row)
        previous = key
    return prompts


def sampled_versions(row: Row) -> set[int]:
    """Encoded versions that sampled tokens of ``row``; see NO_VERSION."""
    codes = row["token_versions"][row["prompt_len"] :]
    # Almost always there is only one. Comparing bytes is faster than numpy's reductions for a short
    # row, and slower for a long one.
    if len(codes) > _LONG:
        alike = codes.min() == codes.max()
    else:
        data = codes.tobytes()
        alike = len(codes) and data == data[: codes.itemsize] * len(codes)
    return ({int(codes[0])} if alike else set(np.unique(codes).tolist())) - _ONLY_NO_VERSION


def split_turns(versions: np.ndarray, start: int) -> Iterator[tuple[bool, slice]]:
    """Turns after the first ``start`` tokens: whether a turn was sampled, and its slice.
    ``versions``: int32 [tokens].

    >>> versions = np.array([0, 7, 8, 0, 0, 8])
    >>> [(sampled, (turn.start, turn.stop)) for sampled, turn in split_turns(versions, 1)]
    [(True, (1, 3)), (False, (3, 5)), (True, (5, 6))]
    """
    sampled = versions[start:] != NO_VERSION
    edges = [start, *(start + 1 + np.flatnonzero(np.diff(sampled))).tolist(), len(versions)]
    return (
        (bool(sampled[begin - start]), slice(begin, end))
        for begin, end in pairwise(edges)
        if begin < end
    )


def field_spec(name: str, values: Sequence[Any]) -> FieldSpec:
    """Spec of field ``name``. For an unknown field it depends on whether its ``values`` are arrays.
    BadRow: they are arrays of something else than numbers."""
    if name in FIELDS:
        return FIELDS[name]
    if not values or not isinstance(values[0], np.ndarray):
        return FieldSpec(name, "blob", "object", "not in the schema")
    if values[0].dtype.kind not in "biuf":
        raise BadRow(
            f"{name}: found an array of {values[0].dtype}, allowed are integers, floats and bool"
        )
    tail = (None,) * (values[0].ndim - 1)
    return FieldSpec(name, "token", values[0].dtype.name, "not in the schema", tail=tail)


def column_lengths(spec: FieldSpec, values: Sequence[Any]) -> tuple[list[int], tuple[int, ...]]:
    """Lengths of the arrays of a per-token field, and the shape of one entry, which is the same in
    all of them.

    BadRow: a value is no array, or has another dtype or shape.
    """
    expected, axes = np.dtype(spec.dtype), 1 + len(spec.tail)
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype != expected or value.ndim != axes:
            raise BadRow(_misfit(spec, np.asarray(value)))
    tails = {value.shape[1:] for value in values} if spec.tail else set()
    for tail in tails:
        pairs = zip(spec.tail, tail, strict=True)
        if not all(size == (expected_size or size) > 0 for expected_size, size in pairs):
            misfit = next(value for value in values if value.shape[1:] == tail)
            raise BadRow(_misfit(spec, misfit))
    if len(tails) > 1:
        raise BadRow(
            f"{spec.name}: found entries of {' and of '.join(map(str, sorted(tails)))}, expected "
            "one shape"
        )
    return [len(value) for value in values], next(iter(tails), ())


def add_optional_fields(
    rows: Sequence[Row], fields: Sequence[str]
) -> tuple[Sequence[Row], tuple[str, ...]]:
    """Generated ``rows``, and ``fields`` with the optional fields that some rows have. A row
    without an optional blob gets {}."""
    optional = tuple(
        name for name in fields_by("rollout", optional=True) if any(name in row for row in rows)
    )
    empty: Row = {name: {} for name in optional if FIELDS[name].kind == "blob"}
    return [{**empty, **row} for row in rows] if empty else rows, (*fields, *optional)


def copy_column(spec: FieldSpec, values: Sequence[Any], memory: memoryview) -> None:
    """Write a field of several rows to ``memory``, which has the size of the result. Per-token
    arrays follow each other without gaps.

    BadRow: the queue rejects the values: wrong shape, out of range, NaN or infinite.
    """
    name = spec.name
    try:
        flat = np.frombuffer(memory, spec.dtype)
        if spec.kind == "token":
            np.concatenate(values, out=flat.reshape(-1, *values[0].shape[1:]))
        else:
            _copy_numbers(spec, np.array(values), flat)
    except BadRow:
        raise
    except (ValueError, TypeError) as error:
        raise BadRow(f"{name}: {error}") from error
    if name in FIELDS and flat.dtype.kind == "f":
        finite = np.isfinite(flat)
        if not finite.all():
            raise BadRow(f"{name}: found {flat[~finite][0]}, expected a finite {spec.dtype}")


def _copy_numbers(spec: FieldSpec, numbers: np.ndarray, flat: np.ndarray) -> None:
    """Copy a number for each row; integers must be unchanged by the conversion."""
    is_float = spec.dtype.startswith("float")
    if numbers.ndim != 1 or numbers.dtype.kind not in ("biuf" if is_float else "iu"):
        raise BadRow(_misfit(spec, numbers))
    with np.errstate(over="ignore"):
        np.copyto(flat, numbers, casting="unsafe")
    if not is_float:
        unchanged = flat == numbers
        if not unchanged.all():
            raise BadRow(f"{spec.name}: found {numbers[~unchanged][0]}, expected {spec.dtype}")


def _misfit(spec: FieldSpec, values: np.ndarray) -> str:
    suffix = "" if spec.kind == "token" else " for each row"
    return f"{spec.name}: found {values.dtype} {list(values.shape)}, expected {spec}{suffix}"
