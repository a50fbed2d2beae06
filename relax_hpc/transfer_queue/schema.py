"""Row schema, format version 1: what a sample carries between the roles.

A row is a dict of fields. Per-token arrays all have the length of the whole sequence, prompt and response, so index i
of every one of them belongs to token i: ``loss_mask[i]`` says whether token i was chosen by the policy and
``rollout_logprobs[i]`` is its log-probability given the tokens before it (0 on the prompt).
Unknown fields are kept and passed on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

FORMAT_VERSION = 1

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: `kind` is "token" (1-d array, one entry a token), "scalar", "text" or "json" (msgpack-able value)."""

    kind: Literal["token", "scalar", "text", "json"]
    dtype: str
    meaning: str


FIELDS: dict[str, FieldSpec] = {
    "sample_id": FieldSpec("text", "str", "{ticket:09d}.{k:02d}"),
    "prompt_id": FieldSpec("text", "str", "id of the prompt in its file"),
    "ticket": FieldSpec("scalar", "int64", "number of the prompt group in the order of admission"),
    "token_ids": FieldSpec("token", "int32", "prompt and response"),
    "prompt_len": FieldSpec("scalar", "int32", "tokens of the prompt"),
    "loss_mask": FieldSpec("token", "uint8", "1: chosen by the policy and trained on"),
    "rollout_logprobs": FieldSpec("token", "float32", "nats, by the engine that sampled"),
    "token_versions": FieldSpec("token", "int32", "Version.encode() of the weights that sampled; 0 on the prompt"),
    "old_logprobs": FieldSpec("token", "float32", "nats, by actor_fwd: the clip's denominator"),
    "old_logprob_version": FieldSpec("scalar", "int32", "Version.encode() of the weights actor_fwd used"),
    "ref_logprobs": FieldSpec("token", "float32", "nats, by the reference"),
    "reward": FieldSpec("scalar", "float32", "task reward"),
    "advantages": FieldSpec("token", "float32", "0 where loss_mask is 0"),
    "spans": FieldSpec("json", "list", "media in the sequence: [{kind, start, length, media_id}]"),
    "finish_reason": FieldSpec("text", "str", "stop | length | abort"),
}


def sample_id(ticket: int, k: int) -> str:
    """Id of sample ``k`` of a prompt group.

    >>> sample_id(123, 4)
    '000000123.04'
    """
    return f"{ticket:09d}.{k:02d}"


def ticket_of(sample: str) -> int:
    """The ticket in a sample id."""
    return int(sample.partition(".")[0])


def check_row(row: Row, fields: tuple[str, ...]) -> str | None:
    """Why ``row`` may not enter the queue with ``fields``, or None: wrong dtype, shape, length or NaN."""
    length = len(row["token_ids"]) if "token_ids" in row else None
    for name in fields:
        spec, value = FIELDS.get(name), row.get(name)
        if value is None:
            return f"{name}: missing"
        if spec is None or spec.kind in ("text", "json"):
            continue
        if spec.kind == "scalar":
            if not np.isscalar(value) or (spec.dtype == "float32" and not np.isfinite(value)):
                return f"{name}: found {value!r}, expected a finite {spec.dtype}"
            continue
        if not isinstance(value, np.ndarray) or value.dtype != spec.dtype or value.ndim != 1:
            return f"{name}: found {getattr(value, 'dtype', type(value).__name__)}, expected a 1-d {spec.dtype} array"
        if length is not None and len(value) != length:
            return f"{name}: {len(value)} entries for {length} tokens"
        if spec.dtype == "float32" and not np.isfinite(value).all():
            return f"{name}: not finite"
    return None
