"""Rows as samples for people: their tokens as texts, turn by turn, with details of each turn."""

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
from relax_hpc.rollout.rows import begins_in_thought
from relax_hpc.rollout.sample_log import Sample
from relax_hpc.rollout.thumbnails import thumbnail_of


def readable_sample(row: Row, tokenizer: Tokenizer, media: Path) -> Sample:
    """Sample of a ``row``: prompt, response, details, and `turns` if an environment took part.

    ``media``: folder of the store of the row's media. A turn: {by: policy or environment, text,
    tokens, versions, media, tool_calls: {name, arguments} or {error}, trained: number of tokens
    that are trained on}; without `trained` if the row has no `loss_mask`. With an environment, the
    sample also has the outcome that the environment reported, and a `Recording`.
    """
    ids, versions = row["token_ids"].tolist(), row["token_versions"]
    before, after = slice(0, int(row["prompt_len"])), slice(int(row["prompt_len"]), len(ids))
    sample = {
        "prompt": tokenizer.decode(ids[before]),
        "response": tokenizer.decode(ids[after]),
        **_details(row, after),
        **_media(row, before, media),
        "tokens": int(np.count_nonzero(versions[after])),
    }
    turns = list(split_turns(versions, after.start))
    if any(not sampled for sampled, _ in turns):
        sample["turns"] = [
            _turn(row, sampled, tokens, tokenizer, media) for sampled, tokens in turns
        ]
    environment = row.get("environment")
    if environment:
        sample["environment"] = reported_outcome(environment)
        sample["recording"] = recording_of(row)
    return sample


def reported_outcome(environment: Mapping[str, Any]) -> dict[str, Any]:
    """`reward` and `info` of an environment, if it has reported them; see `Episode.outcome`."""
    outcome = {name: environment.get(name) for name in ("reward", "info")}
    return {name: value for name, value in outcome.items() if value not in (None, {})}


def _turn(row: Row, sampled: bool, tokens: slice, tokenizer: Tokenizer, media: Path) -> Sample:
    text = tokenizer.decode(row["token_ids"][tokens].tolist())
    turn: Sample = {
        "by": "policy" if sampled else "environment",
        "text": text,
        "tokens": tokens.stop - tokens.start,
    }
    turn |= _details(row, tokens) | _media(row, tokens, media)
    if sampled:
        in_thought = begins_in_thought(row["token_ids"][: tokens.start], tokenizer)
        calls = [_call(call) for call in calls_of(text, in_thought)]
        if calls:
            turn["tool_calls"] = calls
    return turn


def _call(call: ToolCall | ToolError) -> Sample:
    return {"error": str(call)} if isinstance(call, ToolError) else asdict(call)


def _details(row: Row, tokens: slice) -> Sample:
    codes = np.unique(row["token_versions"][tokens]).tolist()
    versions = [str(Version.decode(code)) for code in codes if code != NO_VERSION]
    details: Sample = {"versions": versions}
    if "loss_mask" in row:
        details["trained"] = int(np.count_nonzero(row["loss_mask"][tokens]))
    return details


def _media(row: Row, tokens: slice, folder: Path) -> Sample:
    """Thumbnails of the media that begin in ``tokens``, each once; empty if there are no media."""
    ids = dict.fromkeys(
        span["media_id"] for span in row["spans"] if tokens.start <= span["start"] < tokens.stop
    )
    thumbnails = filter(None, [thumbnail_of(folder / media_id) for media_id in ids])
    media = list(thumbnails)
    return {"media": media} if media else {}
