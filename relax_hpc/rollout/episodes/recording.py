"""Recordings of rows. A sample of an episode against an environment has one, so that the episode
can be played again."""

from __future__ import annotations

from typing import Any

import numpy as np

from relax_hpc.data.generation import Draft
from relax_hpc.queue.row_schema import NO_VERSION, Row
from relax_hpc.rollout.episodes.history import OpenRow, media_in

Recording = dict[str, Any]
"""JSON values: `episode` and `row`, their numbers; `token_ids` of the row; `prompt_len`, tokens of
its prompt; `sampled`, indices of the sampled tokens after the prompt; `turns`, ends of its turns;
`spans` of media."""
_SAMPLED = 1
"""Version of a sampled token. A recording does not have the real one, and a replay does not need
it."""


def recording_of(row: Row) -> Recording:
    """Recording of a row with the field `environment`."""
    prompt_len = int(row["prompt_len"])
    return {
        "episode": row["episode"],
        "row": row["row"],
        "token_ids": row["token_ids"].tolist(),
        "prompt_len": prompt_len,
        "sampled": np.flatnonzero(row["token_versions"][prompt_len:] != NO_VERSION).tolist(),
        "turns": row["environment"]["turns"],
        "spans": row["spans"],
    }


def read_recording(recording: Recording) -> OpenRow:
    """The recorded row; all of its turns are completed. LookupError, TypeError, ValueError: this is
    not a recording."""
    ids = [int(token) for token in recording["token_ids"]]
    prompt_len = int(recording["prompt_len"])
    response_ids = ids[prompt_len:]
    versions = np.full(len(response_ids), NO_VERSION)
    versions[recording["sampled"]] = _SAMPLED
    return OpenRow(
        tuple(ids[:prompt_len]),
        Draft(response_ids, [0.0] * len(response_ids), versions.tolist()),
        media_in(recording["spans"]),
        [int(end) for end in recording["turns"]],
    )
