"""Fields that a row carries between the roles. Each is declared here once, with its producer.

The queue's plan, records, files and exports, the batches of the trainer and of the loss, and the
table in docs/reference/fields.md derive from this table. Two other places add fields: an entry of
`relax_hpc.config.roles.ROLES` for its role, and a user's engine when a configuration names it.

To add a field, add one line here. A field without `optional` is required in every row. Then supply
its values where ``by`` says:

- rollout: fill it in rollout/rows.py, a token field in `_columns`, others in `rows_of`. Values that
  an engine returns (`Generation.extras`) are copied there by `_extras`; such a field must be
  `optional`, because responses that a resumed rollout continues lack it. A required field must also
  be filled in roles/data.py:rows_of, for `sft` and `dpo`.
- advantages: return it in the algorithm's `given`, and name it in `gives`.
- actor_fwd, reference, teacher: extend roles/forward.py:_put, which writes the first field of the
  role, the version, and the teacher's most likely tokens. With `actor.forward`, the same is done in
  roles/inner_forward.py:score.
- critic: extend roles/critic.py:_put.

Then replace the table in docs/reference/fields.md by the lines of `as_markdown`, as
tests/base/test_fields.py checks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from relax_hpc.base.errors import ConfigError


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of a row.

    >>> str(FieldSpec("routes", "token", "uint8", "experts that were chosen", tail=(None, 8)))
    'uint8 [tokens, *, 8]'
    """

    name: str
    kind: Literal["token", "row", "blob"]
    """Kind of its values. "token": an array with one entry for each token, "row": one number or
    text, "blob": any value that msgpack can encode."""
    dtype: str
    """Type of its values: numpy's name for numbers, "str" for text, Python's name of a blob."""
    meaning: str
    unit: str = ""
    """Unit of its values; empty: a pure number, or none."""
    by: str = ""
    """Role that adds it to every row; empty: the queue."""
    tail: tuple[int | None, ...] = ()
    """Shape of one token's entry in a token field. None: any length, equal in all rows of a
    batch."""
    pad: float = 0
    """Value that pads a row in a batch."""
    loss: bool = False
    """Whether the loss receives it, as [rows, tokens, *tail]."""
    optional: bool = False
    """Whether a row may lack it."""

    @property
    def is_number(self) -> bool:
        """Whether its values are numbers, which arrays can hold."""
        return self.kind == "token" or (self.kind == "row" and self.dtype != "str")

    def __str__(self) -> str:
        if self.kind == "token":
            axes = ("tokens", *("*" if size is None else str(size) for size in self.tail))
            return f"{self.dtype} [{', '.join(axes)}]"
        return self.dtype


_TABLE = (
    FieldSpec("row_id", "row", "str", "{ticket:09d}.{episode:02d}.{row:02d}"),
    FieldSpec("prompt_id", "row", "str", "id of the prompt in its file", by="rollout"),
    FieldSpec(
        "ticket",
        "row",
        "int64",
        "number of the prompt group in the order of admission",
        by="rollout",
    ),
    FieldSpec("episode", "row", "int32", "number of the episode in its prompt group", by="rollout"),
    FieldSpec("row", "row", "int32", "number of the row in its episode", by="rollout"),
    FieldSpec("token_ids", "token", "int32", "prompt and response", by="rollout"),
    FieldSpec("prompt_len", "row", "int32", "length of the prompt", "tokens", by="rollout"),
    FieldSpec(
        "loss_mask", "token", "uint8", "1: chosen by the policy and trained on", by="rollout"
    ),
    FieldSpec(
        "rollout_logprobs",
        "token",
        "float32",
        "by the engine that sampled",
        "nats",
        by="rollout",
        loss=True,
    ),
    FieldSpec(
        "token_versions",
        "token",
        "int32",
        "encoded version that sampled; 0: not sampled",
        by="rollout",
    ),
    FieldSpec(
        "old_logprobs",
        "token",
        "float32",
        "the clip's denominator",
        "nats",
        by="actor_fwd",
        loss=True,
    ),
    FieldSpec(
        "old_logprob_version",
        "row",
        "int32",
        "encoded version of the weights that scored",
        by="actor_fwd",
    ),
    FieldSpec(
        "ref_logprobs", "token", "float32", "by the reference", "nats", by="reference", loss=True
    ),
    FieldSpec(
        "teacher_logprobs", "token", "float32", "by the teacher", "nats", by="teacher", loss=True
    ),
    FieldSpec(
        "teacher_top_ids",
        "token",
        "int32",
        "the teacher's likeliest tokens, of runs with `algorithm.teacher_top_k`",
        by="teacher",
        tail=(None,),
        loss=True,
        optional=True,
    ),
    FieldSpec(
        "teacher_top_logprobs",
        "token",
        "float32",
        "log-probabilities of `teacher_top_ids`, by the teacher",
        "nats",
        by="teacher",
        tail=(None,),
        loss=True,
        optional=True,
    ),
    FieldSpec("reward", "row", "float32", "task reward of the episode", by="rollout"),
    FieldSpec(
        "advantages", "token", "float32", "0 where loss_mask is 0", by="advantages", loss=True
    ),
    FieldSpec(
        "values",
        "token",
        "float32",
        "by the critic, of the tokens before this one",
        by="critic",
        loss=True,
    ),
    FieldSpec(
        "returns",
        "token",
        "float32",
        "targets of the critic",
        by="advantages",
        loss=True,
        optional=True,
    ),
    FieldSpec(
        "spans",
        "blob",
        "list",
        "media in the sequence: [{kind, start, length, media_id}]",
        by="rollout",
    ),
    FieldSpec(
        "media_tokens",
        "blob",
        "dict",
        "number of placeholders of each medium, by media id",
        by="rollout",
        optional=True,
    ),
    FieldSpec(
        "finish_reason",
        "row",
        "str",
        "reason for its end, see `FinishReason`; partial: not yet",
        by="rollout",
    ),
    FieldSpec(
        "environment",
        "blob",
        "dict",
        "of an episode against an environment. `turns`: end of each turn, in tokens after the "
        "prompt. Last row only: `info`, `reward`, `row`",
        by="rollout",
        optional=True,
    ),
)

ROUTES = FieldSpec(
    "routed_experts",
    "token",
    "uint8",
    "experts of each layer by the engine, see `relax_hpc.base.routes`; of runs with "
    "`model.routing_replay`",
    by="rollout",
    tail=(None, None, None),
    pad=255,
    optional=True,
)
"""Field of the routes. `declare_fields` adds it to the table if the configuration of a run asks for
it. Other runs neither write nor read it."""

FIELDS: dict[str, FieldSpec] = {spec.name: spec for spec in _TABLE}
"""Fields by name, in the order of the table."""


def declare_fields(where: str, specs: Iterable[FieldSpec]) -> None:
    """Add the fields that the engine of a run returns for each token.

    ConfigError, which begins with ``where``: a field is not of kind token, or another field has its
    name.
    """
    for spec in specs:
        new = replace(spec, by="rollout", optional=True)
        existing = FIELDS.get(new.name, new)
        if new.kind != "token" or existing != new:
            raise ConfigError(
                f"{where}: found field {new.name}, a {new.kind} of {new}, allowed: fields of kind "
                f"token, by names that no other field has ({new.name} is {existing} of "
                f"{existing.by or 'the queue'}); rename it"
            )
        FIELDS[new.name] = new


def declare_role_fields(role: str, specs: Iterable[FieldSpec]) -> None:
    """Add the fields that the entry of ``role`` in `relax_hpc.config.roles.ROLES` declares.

    ``role`` becomes their producer. ConfigError: another field has the name.
    """
    for spec in specs:
        new = replace(spec, by=role)
        existing = FIELDS.get(new.name, new)
        if existing != new:
            raise ConfigError(
                f"relax_hpc.config.roles: found field {new.name} of role {role}, which is also "
                f"{existing} of {existing.by or 'the queue'}, allowed: a name that no other field "
                "has; rename it"
            )
        FIELDS[new.name] = new


def fields_by(role: str, optional: bool = False) -> tuple[str, ...]:
    """Names of the fields that ``role`` adds to every row; ``optional``: that it adds to some rows.

    >>> fields_by("actor_fwd"), fields_by("rollout", optional=True)
    (('old_logprobs', 'old_logprob_version'), ('media_tokens', 'environment'))
    """
    return tuple(
        name for name, spec in FIELDS.items() if spec.by == role and spec.optional == optional
    )


def loss_fields() -> tuple[str, ...]:
    """Names of the fields of a row that the loss receives.

    It also receives the row's mask and the log-probabilities of the trained policy.

    >>> loss_fields()[:4]
    ('rollout_logprobs', 'old_logprobs', 'ref_logprobs', 'teacher_logprobs')
    """
    return tuple(name for name, spec in FIELDS.items() if spec.loss)


def roles_for(fields: Iterable[str]) -> set[str]:
    """Roles that compute these ``fields``.

    >>> sorted(roles_for(("reward", "ref_logprobs")))
    ['reference', 'rollout']
    """
    return {FIELDS[name].by for name in fields if name in FIELDS} - {""}


def as_markdown() -> Iterator[str]:
    """Lines of the table in docs/reference/fields.md: the fields of this module.

    Fields that entries of roles or engines declare are not part of it.
    """
    yield "| field | kind | values | by | in the loss | meaning |"
    yield "|---|---|---|---|---|---|"
    for spec in (*_TABLE, ROUTES):
        by = f"{spec.by}, may lack" if spec.optional else spec.by or "the queue"
        meaning = f"{spec.meaning} ({spec.unit})" if spec.unit else spec.meaning
        yield (
            f"| `{spec.name}` | {spec.kind} | {spec} | {by} | {'yes' if spec.loss else ''} | "
            f"{meaning.replace('|', '/')} |"
        )
