"""Rows made readable: their tokens as texts, turn by turn, and what is known of each part."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.base.versions import Version
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.tool_calls import ToolCall, ToolError, calls_of
from relax_hpc.queue.row_schema import NO_VERSION, Row, split_turns
from relax_hpc.rollout.episodes.recording import recording_of
from relax_hpc.rollout.sample_log import Sample
from relax_hpc.rollout.samples import begins_in_thought
from relax_hpc.rollout.thumbnails import thumbnail_of


def readable(row: Row, tokenizer: Tokenizer, media: Path) -> Sample:
    """``row`` as people read it: prompt, response, what is known of them, and `turns` where others
    spoke too.

    ``media``: folder of the store of what its spans name. A turn: {by: policy or environment, text,
    tokens, versions, media, tool_calls: {name, arguments} or {error}}; and how many tokens are
    `trained` on, unless the row has no `loss_mask`. Of an episode against an environment also its
    last words, if it had any, and a `Recording`.
    """
    ids, versions = row["token_ids"].tolist(), row["token_versions"]
    before, after = slice(0, int(row["prompt_len"])), slice(int(row["prompt_len"]), len(ids))
    sample = {
        "prompt": tokenizer.decode(ids[before]),
        "response": tokenizer.decode(ids[after]),
        **_known(row, after),
        **_media(row, before, media),
        "tokens": int(np.count_nonzero(versions[after])),
    }
    turns = list(split_turns(versions, after.start))
    if any(not sampled for sampled, _ in turns):
        sample["turns"] = [_turn(row, sampled, part, tokenizer, media) for sampled, part in turns]
    if told := row.get("environment"):
        sample |= {"environment": last_words(told), "recording": recording_of(row)}
    return sample


def last_words(told: Mapping[str, Any]) -> dict[str, Any]:
    """Words of an environment on its episode, see `Episode.outcome`: `reward` and `info`, if it had
    any."""
    return {
        name: value for name in ("reward", "info") if (value := told.get(name)) not in (None, {})
    }


def _turn(row: Row, sampled: bool, part: slice, tokenizer: Tokenizer, media: Path) -> Sample:
    text = tokenizer.decode(row["token_ids"][part].tolist())
    in_thought = begins_in_thought(row["token_ids"][: part.start], tokenizer)
    about = {
        "by": "policy" if sampled else "environment",
        "text": text,
        "tokens": part.stop - part.start,
    }
    calls = [_call(call) for call in calls_of(text, in_thought)] if sampled else []
    return (
        about
        | _known(row, part)
        | _media(row, part, media)
        | ({"tool_calls": calls} if calls else {})
    )


def _call(found: ToolCall | ToolError) -> Sample:
    return {"error": str(found)} if isinstance(found, ToolError) else asdict(found)


def _known(row: Row, part: slice) -> Sample:
    codes = np.unique(row["token_versions"][part]).tolist()
    known = {"versions": [str(Version.decode(code)) for code in codes if code != NO_VERSION]}
    return (
        known | {"trained": int(np.count_nonzero(row["loss_mask"][part]))}
        if "loss_mask" in row
        else known
    )


def _media(row: Row, part: slice, folder: Path) -> Sample:
    """Thumbnails of the media that begin in ``part``, each once; nothing where there are none."""
    ids = dict.fromkeys(
        span["media_id"] for span in row["spans"] if part.start <= span["start"] < part.stop
    )
    found = [shown for media_id in ids if (shown := thumbnail_of(folder / media_id))]
    return {"media": found} if found else {}
