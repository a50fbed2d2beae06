"""Row schema, format version 2: what a training sequence carries between the roles.

A row is a dict of fields. Per-token arrays all have the length of the whole sequence, prompt and
response, so index i of every one of them belongs to token i: ``loss_mask[i]`` says whether token i
was chosen by the policy and ``rollout_logprobs[i]`` is its log-probability given the tokens before
it. An episode, one attempt at a prompt, has one row or several, and its reward is in each of them.
Unknown fields are kept and passed on; where their values are arrays of numbers, of any length but
of one dtype and one shape behind the first axis, as arrays.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from relax_hpc.base.fields import FIELDS, FieldSpec, fields_by
from relax_hpc.queue.row_ids import place_of

FORMAT_VERSION = 2
NOBODY = 0
"""Encoded version, of no incarnation, of tokens that nobody sampled: those of the prompt, and what
others put between those of the policy, such as a tool. Their mask and their log-probabilities are
0."""
_NOBODY_ALONE = frozenset((NOBODY,))
_LONG = 4096
"""Entries of a row above which numpy's reductions are faster than comparing bytes."""

Row = dict[str, Any]


class BadRow(ValueError):
    """Rows that may not enter the queue; the message names the field."""


def by_prompt(rows: Sequence[Row]) -> list[list[list[Row]]]:
    """``rows``, in the order of their ids, as [prompt group][episode][row]."""
    prompts: list[list[list[Row]]] = []
    last: tuple[int, ...] = ()
    for row in rows:
        place = place_of(row["row_id"])
        if place[:1] != last[:1]:
            prompts.append([])
        if place[:2] != last[:2]:
            prompts[-1].append([])
        prompts[-1][-1].append(row)
        last = place
    return prompts


def sampled_versions(row: Row) -> set[int]:
    """Encoded versions that drew tokens of ``row``; see NOBODY."""
    codes = row["token_versions"][row["prompt_len"] :]
    # Almost always there is one. Comparing bytes is cheaper than numpy's reductions for a short
    # row, and dearer for a long one.
    if len(codes) > _LONG:
        alike = codes.min() == codes.max()
    else:
        data = codes.tobytes()
        alike = len(codes) and data == data[: codes.itemsize] * len(codes)
    return ({int(codes[0])} if alike else set(np.unique(codes).tolist())) - _NOBODY_ALONE


def turns_of(versions: np.ndarray, start: int) -> Iterator[tuple[bool, slice]]:
    """Whether each turn behind the first ``start`` tokens was sampled, and where it lies;
    ``versions``: int32 [tokens].

    >>> [(sampled, (part.start, part.stop)) for sampled, part in turns_of(np.array([0, 7, 8, 0, 0,
    ...     8]), 1)]
    [(True, (1, 3)), (False, (3, 5)), (True, (5, 6))]
    """
    sampled = versions[start:] != NOBODY
    edges = [start, *(start + 1 + np.flatnonzero(np.diff(sampled))).tolist(), len(versions)]
    return (
        (bool(sampled[begin - start]), slice(begin, end))
        for begin, end in pairwise(edges)
        if begin < end
    )


def spec_of(name: str, values: Sequence[Any]) -> FieldSpec:
    """Spec of field ``name``; of an unknown one, whether its ``values`` are arrays. BadRow: not of
    numbers."""
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


def lengths_of(spec: FieldSpec, values: Sequence[Any]) -> tuple[list[int], tuple[int, ...]]:
    """Entries of each array of a per-token field, and the shape of one entry: it is the same in all
    of them.

    BadRow if one is no array, or not of its dtype and shape.
    """
    expected, axes = np.dtype(spec.dtype), 1 + len(spec.tail)
    for value in values:
        if not isinstance(value, np.ndarray) or value.dtype != expected or value.ndim != axes:
            raise BadRow(_unfit(spec, np.asarray(value)))
    tails = {value.shape[1:] for value in values} if spec.tail else set()
    for tail in tails:
        if not all(
            found == (want or found) > 0 for want, found in zip(spec.tail, tail, strict=True)
        ):
            raise BadRow(_unfit(spec, next(value for value in values if value.shape[1:] == tail)))
    if len(tails) > 1:
        raise BadRow(
            f"{spec.name}: found entries of {' and of '.join(map(str, sorted(tails)))}, expected "
            "one shape"
        )
    return [len(value) for value in values], next(iter(tails), ())


def with_optional(
    rows: Sequence[Row], fields: Sequence[str]
) -> tuple[Sequence[Row], tuple[str, ...]]:
    """Generated ``rows``, and ``fields`` with the optional ones that some of them have; a row
    without a blob has {}."""
    also = tuple(
        name for name in fields_by("rollout", optional=True) if any(name in row for row in rows)
    )
    empty = {name: {} for name in also if FIELDS[name].kind == "blob"}
    return [{**empty, **row} for row in rows] if empty else rows, (*fields, *also)


def copy_column(spec: FieldSpec, values: Sequence[Any], memory: memoryview) -> None:
    """Write a field of several rows to ``memory``, which is of its size, per-token arrays end to
    end.

    BadRow if the values may not enter the queue: wrong shape, out of range, NaN or infinite.
    """
    name = spec.name
    try:
        if spec.kind == "token":
            flat = np.frombuffer(memory, spec.dtype)
            np.concatenate(values, out=flat.reshape(-1, *values[0].shape[1:]))
        else:
            found = np.array(values)
            if found.ndim != 1 or found.dtype.kind not in (
                "biuf" if spec.dtype.startswith("float") else "iu"
            ):
                raise BadRow(_unfit(spec, found))
            flat = np.frombuffer(memory, spec.dtype)
            with np.errstate(over="ignore"):
                np.copyto(flat, found, casting="unsafe")
            if not spec.dtype.startswith("float") and not (whole := flat == found).all():
                raise BadRow(f"{name}: found {found[~whole][0]}, expected {spec.dtype}")
    except (ValueError, TypeError) as error:
        raise error if isinstance(error, BadRow) else BadRow(f"{name}: {error}") from error
    if name in FIELDS and flat.dtype.kind == "f" and not (finite := np.isfinite(flat)).all():
        raise BadRow(f"{name}: found {flat[~finite][0]}, expected a finite {spec.dtype}")


def _unfit(spec: FieldSpec, found: np.ndarray) -> str:
    of = "" if spec.kind == "token" else " for each row"
    return f"{spec.name}: found {found.dtype} {list(found.shape)}, expected {spec}{of}"
