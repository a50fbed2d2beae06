"""Engine requests for prompts, and queue rows of an engine's answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from relax_hpc.base.error_origin import describe_error, locate_error
from relax_hpc.base.fields import FIELDS
from relax_hpc.base.routes import BAD_ROUTES, RouteShape
from relax_hpc.data.generation import (
    CUT_REASONS,
    Episode,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.data.media import spans_of, tokens_by_id
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.tool_calls import opens_thought
from relax_hpc.queue.records import FILTERED
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import NO_VERSION, Row, split_turns
from relax_hpc.rewards import RewardInput
from relax_hpc.rollout.engines.engine import EngineFault
from relax_hpc.rollout.filters import Filter
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.prompt_source import PromptSource  # noqa: F401  # Name in release 0.1.

TAIL = 16
"""Tokens at the end of a prompt that show whether the template has opened a thought."""


def draw_key(ticket: int, prompt: Prompt) -> str:
    """Key of the random numbers of a prompt, in addition to the seed and the sample. It contains
    the ticket, so that the responses differ at the next visit of the prompt."""
    return f"{ticket}/{prompt.prompt_id}"


def requests_for(
    prompt: Prompt, ticket: int, samples: int, sampling: Sampling, budget: int
) -> list[GenerateRequest]:
    """One request a sample, each of at most ``budget`` tokens."""
    key = draw_key(ticket, prompt)
    return [
        GenerateRequest(prompt.token_ids, key, k, sampling, budget, prompt.media)
        for k in range(samples)
    ]


def reward_input(prompt: Prompt, answer: Generation | Episode, tokenizer: Tokenizer) -> RewardInput:
    """Input of a reward for one episode."""
    if isinstance(answer, Episode) and answer.outcome:
        return _reward_input_of_turns(prompt, answer, tokenizer)
    generation, rows = last_response(answer), []
    if isinstance(answer, Episode) and len(answer.rows) > 1:
        rows = [
            [tokenizer.decode(list(row.prompt)), response_text(row.generation, tokenizer)]
            for row in answer.rows
        ]
    text = rows[-1][1] if rows else response_text(generation, tokenizer)
    return RewardInput(
        prompt.text, prompt.answer, text, generation.finish_reason, prompt.metadata, rows
    )


def _reward_input_of_turns(prompt: Prompt, episode: Episode, tokenizer: Tokenizer) -> RewardInput:
    """Input of a reward for an episode that was played against an environment."""
    assert episode.outcome
    turns, reason = list(turns_in(episode, tokenizer)), episode.finish_reason
    number = episode.outcome["row"]
    last_text = next(
        turn["text"] for turn in reversed(turns) if turn["by"] == "policy" and turn["row"] == number
    )
    return RewardInput(
        prompt.text,
        prompt.answer,
        last_text,
        "length" if reason in CUT_REASONS else "stop",
        prompt.metadata,
        turns=turns,
        environment={
            "info": episode.outcome["info"],
            "reward": episode.outcome["reward"],
            "ended": reason,
        },
    )


def turns_in(episode: Episode, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Turns of the policy and of the environment in an episode, see `RewardInput.turns`."""
    for number, row in enumerate(episode.rows):
        ids = row.generation.token_ids
        for sampled, tokens in split_turns(np.asarray(row.generation.token_versions), 0):
            turn_ids = ids[tokens]
            text = turn_text(turn_ids, tokenizer) if sampled else tokenizer.decode(turn_ids)
            yield {"by": "policy" if sampled else "environment", "row": number, "text": text}


def response_text(generation: Generation, tokenizer: Tokenizer) -> str:
    """Text of a response, without special tokens."""
    ids = generation.token_ids
    # A response that a stop text has ended has no end token.
    has_end_token = generation.finish_reason == "stop" and ids[-1] in tokenizer.eos_ids
    return tokenizer.decode(ids[:-1] if has_end_token else ids)


def turn_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of a turn, without special tokens."""
    has_end_token = token_ids[-1] in tokenizer.eos_ids
    return tokenizer.decode(list(token_ids[:-1] if has_end_token else token_ids))


def begins_in_thought(before: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a turn after the tokens ``before`` begins inside a thought that the chat template has
    opened."""
    return opens_thought(tokenizer.decode([int(token) for token in before[-TAIL:]]))


def last_response(answer: Generation | Episode) -> Generation:
    """The response, or the one in the last row of an episode."""
    return answer.rows[-1].generation if isinstance(answer, Episode) else answer


def was_cut(answer: Generation | Episode) -> bool:
    """Whether a limit has cut a response, in any row of an episode; see `CUT_REASONS`."""
    responses = [row.generation for row in answer.rows] if isinstance(answer, Episode) else [answer]
    return any(response.finish_reason in CUT_REASONS for response in responses)


def failure_of_answers(answers: Sequence[Generation | Episode | EngineFault]) -> Failure | None:
    """Failure of a prompt group if one of its ``answers`` is not a response, because only whole
    groups enter the queue; else None."""
    for answer in answers:
        if isinstance(answer, EngineFault):
            return Failure(answer.reason, str(answer), origin=answer.origin)
        if answer.finish_reason == "abort":
            return Failure("aborted", "the engine aborted the response")
    return None


def group_rows(
    prompt: Prompt,
    ticket: int,
    answers: Sequence[Generation | Episode],
    rewards: Sequence[float],
    keeps: Filter = lambda rewards: True,
    newest_only: bool = False,
    whole_only: bool = False,
) -> list[Row] | Failure:
    """The rows of a prompt group, or the reason why it has none.

    ``keeps``: filter of the group by its rewards. ``newest_only``: see `mask_older_tokens`.
    ``whole_only``: episodes that a limit has cut (`was_cut`) are not trained on.
    """
    try:
        kept = bool(keeps(list(rewards)))
    except Exception as error:  # a user's function may raise anything
        detail = f"filter_exception: {describe_error(error)} (prompt {prompt.prompt_id})"
        return Failure("filter_exception", detail, origin=locate_error(error))
    if not kept:
        return Failure(
            FILTERED, f"rewards {sorted(set(rewards))} (prompt {prompt.prompt_id})", tuple(rewards)
        )
    rows = rows_of(prompt, ticket, dict(enumerate(answers)))
    for row in rows:
        row["reward"] = rewards[row["episode"]]
        if newest_only:
            mask_older_tokens(row)
        if whole_only and was_cut(answers[row["episode"]]):
            row["loss_mask"][:] = 0
    return rows


def bad_routes(shape: RouteShape, rows: Sequence[Row]) -> Failure | None:
    """Failure of a prompt group if one of its ``rows`` has no valid routes of ``shape``; it names
    the first such row. Else None."""
    for row in rows:
        fault = shape.find_fault(row)
        if fault:
            return Failure(BAD_ROUTES, f"{BAD_ROUTES}: {row['row_id']}: {fault}")
    return None


def mask_older_tokens(row: Row) -> None:
    """Train only on tokens of the version that sampled the last sampled token of ``row``."""
    versions = row["token_versions"]
    sampled = versions[versions != NO_VERSION]
    if len(sampled):
        row["loss_mask"] *= versions == sampled[-1]


def rows_of(prompt: Prompt, ticket: int, answers: Mapping[int, Generation | Episode]) -> list[Row]:
    """The rows of episodes of a prompt group, without rewards. ``answers``: by episode number.

    The arrays of all rows are created together, and each row is a view. For many short rows, the
    creation of arrays is most of the work.
    """
    episode_rows: list[tuple[int, int, EpisodeRow]] = []
    for episode, answer in answers.items():
        for number, episode_row in enumerate(_episode_rows(prompt, answer)):
            episode_rows.append((episode, number, episode_row))
    if not episode_rows:
        return []
    columns = _columns([episode_row for *_, episode_row in episode_rows])
    rows: list[Row] = []
    start = 0
    for episode, number, episode_row in episode_rows:
        generation = episode_row.generation
        end = start + len(episode_row.prompt) + len(generation.token_ids)
        rows.append(
            {
                "row_id": row_id(ticket, episode, number),
                "prompt_id": prompt.prompt_id,
                "ticket": ticket,
                "episode": episode,
                "row": number,
                **{name: values[start:end] for name, values in columns.items()},
                "prompt_len": len(episode_row.prompt),
                **_media_fields(prompt, episode_row),
                "finish_reason": generation.finish_reason,
                **_environment_field(answers[episode], episode_row),
                **_extras(episode_row),
            }
        )
        start = end
    return rows


def _columns(episode_rows: Sequence[EpisodeRow]) -> dict[str, np.ndarray]:
    """Per-token fields of all rows, concatenated. Tokens without a version were not sampled, and
    are not trained on."""
    zeros = np.zeros(max(len(row.prompt) for row in episode_rows), np.float32)
    no_versions = np.full(len(zeros), NO_VERSION, np.int32)
    token_ids: list[int] = []
    version_arrays: list[np.ndarray] = []
    logprob_arrays: list[np.ndarray] = []
    for row in episode_rows:
        prompt_len, generation = len(row.prompt), row.generation
        token_ids += row.prompt
        token_ids += generation.token_ids
        version_arrays += (no_versions[:prompt_len], generation.token_versions)
        logprob_arrays += (zeros[:prompt_len], np.array(generation.logprobs, np.float32))
    versions = np.concatenate(version_arrays)
    return {
        "token_ids": np.array(token_ids, np.int32),
        "loss_mask": (versions != NO_VERSION).astype(np.uint8),
        "rollout_logprobs": np.concatenate(logprob_arrays),
        "token_versions": versions.astype(np.int32, copy=False),
    }


def _episode_rows(prompt: Prompt, answer: Generation | Episode) -> Sequence[EpisodeRow]:
    return answer.rows if isinstance(answer, Episode) else [EpisodeRow(prompt.token_ids, answer)]


def _environment_field(answer: Generation | Episode, episode_row: EpisodeRow) -> Row:
    """Field `environment` of a row, if its episode was played against an environment."""
    if episode_row.turns is None:
        return {}
    outcome = answer.outcome if isinstance(answer, Episode) else None
    return {"environment": {"turns": list(episode_row.turns), **(outcome or {})}}


def _media_fields(prompt: Prompt, episode_row: EpisodeRow) -> Row:
    """Fields about media. A row without `media` has those of the ``prompt`` if it begins with
    it."""
    media = episode_row.media
    if media is None:
        begins_with_prompt = tuple(episode_row.prompt[: len(prompt.token_ids)]) == prompt.token_ids
        media = prompt.media if begins_with_prompt else ()
    if not media:
        return {"spans": []}
    return {"spans": spans_of(media), "media_tokens": tokens_by_id(media)}


def _extras(episode_row: EpisodeRow) -> Row:
    """Declared fields that the engine gave in addition to the tokens."""
    fields: Row = {}
    prompt_len = len(episode_row.prompt)
    generation = episode_row.generation
    for name, values in generation.extras.items():
        if name in FIELDS:
            padding = np.full((prompt_len, *values.shape[1:]), FIELDS[name].pad, values.dtype)
            before = generation.before.get(name, padding)[:prompt_len]
            column, dtype = np.concatenate([before, values]), FIELDS[name].dtype
            # A cast to another kind of number would hide an error, which the check of rows reports.
            if np.can_cast(column.dtype, dtype, "same_kind"):
                column = column.astype(dtype, copy=False)
            fields[name] = column
    return fields
