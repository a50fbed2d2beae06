"""Recordings of rows, which samples of episodes against an environment have, so that these can be
played again."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_hpc.queue.row_schema import NO_VERSION, Row
from relax_hpc.rollout.engines.engine import Draft
from relax_hpc.rollout.episodes.history import OpenRow, media_in

Recording = dict[str, Any]
"""JSON values: `episode` and `row`, their numbers; `token_ids` of the row, which began with
`prompt_len` of them; `sampled`, places of those behind that the policy has sampled; `turns`, ends
of its turns; `spans` of media."""
_SAMPLED = 1
"""Version of a sampled token here, where it is of no interest which."""


def recording_of(row: Row) -> Recording:
    """Recording of a row with the field `environment`."""
    known = int(row["prompt_len"])
    return {
        "episode": row["episode"],
        "row": row["row"],
        "token_ids": row["token_ids"].tolist(),
        "prompt_len": known,
        "sampled": np.flatnonzero(row["token_versions"][known:] != NO_VERSION).tolist(),
        "turns": row["environment"]["turns"],
        "spans": row["spans"],
    }


def open_row(recording: Recording) -> OpenRow:
    """The row, all turns of which are over. LookupError, TypeError, ValueError: this is no
    recording."""
    ids, known = [int(token) for token in recording["token_ids"]], int(recording["prompt_len"])
    made, versions = ids[known:], np.full(len(ids) - known, NO_VERSION)
    versions[recording["sampled"]] = _SAMPLED
    draft = Draft(made, [0.0] * len(made), versions.tolist())
    return OpenRow(
        tuple(ids[:known]),
        draft,
        media_in(recording["spans"]),
        [int(end) for end in recording["turns"]],
    )
