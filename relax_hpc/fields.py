"""What a row carries between the roles: each field declared once, with who makes it.

The queue's plan, its shards, the table of roles and exports derive from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field: `kind` is "token" (1-d array, one entry a token), "scalar", "text" or "json" (msgpack-able value)."""

    kind: Literal["token", "scalar", "text", "json"]
    dtype: str
    meaning: str
    unit: str = ""
    """Empty: a pure number, or none."""
    by: str = ""
    """The role that puts it into every row; empty: none does."""


FIELDS: dict[str, FieldSpec] = {
    "sample_id": FieldSpec("text", "str", "{ticket:09d}.{k:02d}"),
    "prompt_id": FieldSpec("text", "str", "id of the prompt in its file", by="rollout"),
    "ticket": FieldSpec("scalar", "int64", "number of the prompt group in the order of admission", by="rollout"),
    "token_ids": FieldSpec("token", "int32", "prompt and response", by="rollout"),
    "prompt_len": FieldSpec("scalar", "int32", "length of the prompt", "tokens", by="rollout"),
    "loss_mask": FieldSpec("token", "uint8", "1: chosen by the policy and trained on", by="rollout"),
    "rollout_logprobs": FieldSpec("token", "float32", "by the engine that sampled", "nats", by="rollout"),
    "token_versions": FieldSpec(
        "token", "int32", "Version.encode() of the weights that sampled; 0 on the prompt", by="rollout"
    ),
    "old_logprobs": FieldSpec("token", "float32", "by actor_fwd: the clip's denominator", "nats", by="actor_fwd"),
    "old_logprob_version": FieldSpec(
        "scalar", "int32", "Version.encode() of the weights actor_fwd used", by="actor_fwd"
    ),
    "ref_logprobs": FieldSpec("token", "float32", "by the reference", "nats", by="reference"),
    "reward": FieldSpec("scalar", "float32", "task reward", by="rollout"),
    "advantages": FieldSpec("token", "float32", "0 where loss_mask is 0", by="advantages"),
    "spans": FieldSpec("json", "list", "media in the sequence: [{kind, start, length, media_id}]", by="rollout"),
    "media_tokens": FieldSpec("json", "dict", "placeholders by media id, as whoever prepared the prompt counted them"),
    "finish_reason": FieldSpec("text", "str", "stop | length | abort | partial: kept, and not ended yet", by="rollout"),
}


def fields_by(role: str) -> tuple[str, ...]:
    """What ``role`` puts into every row.

    >>> fields_by("actor_fwd")
    ('old_logprobs', 'old_logprob_version')
    """
    return tuple(name for name, spec in FIELDS.items() if spec.by == role)
