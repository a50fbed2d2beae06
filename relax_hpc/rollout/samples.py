"""Engine requests of prompts, and queue rows of an engine's answers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np

from relax_hpc.base.error_origin import describe_error, locate_error
from relax_hpc.base.fields import FIELDS
from relax_hpc.base.routes import BAD_ROUTES, RouteShape
from relax_hpc.config.schema import Config
from relax_hpc.data.media import spans_of, tokens_by_id
from relax_hpc.data.prompt_file import PromptFile, PromptSets
from relax_hpc.data.prompts import Prompt
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.data.visits import Visits
from relax_hpc.environments.tool_calls import opens_thought
from relax_hpc.queue.records import FILTERED
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import NO_VERSION, Row, split_turns
from relax_hpc.rewards import RewardInput
from relax_hpc.rollout.engines.engine import (
    CUT_REASONS,
    EngineFault,
    Episode,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.rollout.filters import Filter
from relax_hpc.rollout.outcomes import Failure

_MOST_FETCHED = 4096
"""Prompts in memory that nobody has asked for yet."""
TAIL = 16
"""Tokens at the end of a prompt that show whether the template has opened a thought."""


class PromptSource:
    """Source of training prompts: a ticket's depends on the seed, the ticket and the attempt
    alone."""

    def __init__(self, prompts: Sequence[Prompt], config: Config) -> None:
        self.prompts = prompts
        self._visits = visits_of(prompts, config)
        self._fetched: dict[int, Prompt] = {}

    def prompt(self, ticket: int, attempt: int) -> Prompt:
        """Prompt of an attempt at a ticket, read unless it was fetched. Errors as of
        `PromptFile`."""
        place = self._place(ticket, attempt)
        return self._fetched.pop(place, None) or self.prompts[place]

    def fetch(self, wanted: Iterable[tuple[int, int]]) -> None:
        """Read prompts of (ticket, attempt) that are wanted soon, in whatever thread this is."""
        for place in (self._place(*each) for each in wanted):
            if place not in self._fetched:
                self._fetched[place] = self.prompts[place]
        for place in list(self._fetched)[:-_MOST_FETCHED]:
            self._fetched.pop(place, None)

    def following(self, ticket: int, count: int) -> list[Prompt]:
        """Prompts of the ``count`` tickets behind ``ticket``, at their first attempts, fetched in
        whatever thread this is."""
        wanted = [(number, 0) for number in range(ticket + 1, ticket + 1 + count)]
        self.fetch(wanted)
        found = (self._fetched.get(self._place(*each)) for each in wanted)
        return [prompt for prompt in found if prompt]

    def _place(self, ticket: int, attempt: int) -> int:
        return self._visits.prompt_at(ticket, attempt)


def visits_of(prompts: Sequence[Prompt], config: Config) -> Visits:
    """Order in which a run visits ``prompts``."""
    data = config.data
    order = (
        prompts.order if data.order_by and isinstance(prompts, PromptFile | PromptSets) else None
    )
    if isinstance(prompts, PromptSets):
        counts = {name: len(file) for name, file in prompts.sets.items()}
    else:
        counts = {"train": len(prompts)}
    weights = [data.train_weights[name] for name in counts] if data.train_weights else []
    return Visits(list(counts.values()), weights, config.seed, data.shuffle, order)


def draw_key(ticket: int, prompt: Prompt) -> str:
    """Key of a prompt's draws, beside the seed and the sample. The ticket is part of it, so that a
    prompt's next visit samples anew."""
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
        return _of_turns(prompt, answer, tokenizer)
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


def _of_turns(prompt: Prompt, episode: Episode, tokenizer: Tokenizer) -> RewardInput:
    """The same of an episode that was played against an environment."""
    assert episode.outcome
    turns, ended = list(turns_in(episode, tokenizer)), episode.finish_reason
    finish = "length" if ended in CUT_REASONS else "stop"
    number = episode.outcome["row"]
    last = next(
        turn["text"] for turn in reversed(turns) if turn["by"] == "policy" and turn["row"] == number
    )
    told = {name: episode.outcome[name] for name in ("info", "reward")} | {"ended": ended}
    return RewardInput(
        prompt.text, prompt.answer, last, finish, prompt.metadata, turns=turns, environment=told
    )


def turns_in(episode: Episode, tokenizer: Tokenizer) -> Iterator[dict[str, Any]]:
    """Turns of the policy and words of the environment in an episode, see `RewardInput.turns`."""
    for number, row in enumerate(episode.rows):
        ids = row.generation.token_ids
        for mine, part in split_turns(np.asarray(row.generation.token_versions), 0):
            text = turn_text(ids[part], tokenizer) if mine else tokenizer.decode(ids[part])
            yield {"by": "policy" if mine else "environment", "row": number, "text": text}


def response_text(made: Generation, tokenizer: Tokenizer) -> str:
    """Text of a response, without special tokens."""
    # One that a text has ended has no end token.
    ended = made.finish_reason == "stop" and made.token_ids[-1] in tokenizer.eos_ids
    return tokenizer.decode(made.token_ids[:-1] if ended else made.token_ids)


def turn_text(token_ids: Sequence[int], tokenizer: Tokenizer) -> str:
    """Text of a turn, without special tokens."""
    return tokenizer.decode(
        list(token_ids[:-1] if token_ids[-1] in tokenizer.eos_ids else token_ids)
    )


def begins_in_thought(before: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a turn that follows the tokens ``before`` begins within a thought, which the chat
    template has opened."""
    return opens_thought(tokenizer.decode([int(token) for token in before[-TAIL:]]))


def last_response(answer: Generation | Episode) -> Generation:
    """Response in the last row of an episode, or the only one."""
    return answer.rows[-1].generation if isinstance(answer, Episode) else answer


def was_cut(answer: Generation | Episode) -> bool:
    """Whether a bound has cut what the policy would have said, in any row of an episode, see
    `CUT_REASONS`."""
    responses = [row.generation for row in answer.rows] if isinstance(answer, Episode) else [answer]
    return any(response.finish_reason in CUT_REASONS for response in responses)


def refused(answers: Sequence[Generation | Episode | EngineFault]) -> Failure | None:
    """Failure of a prompt group one of whose ``answers`` is no response, since groups enter the
    queue whole; else None."""
    for answer in answers:
        if isinstance(answer, EngineFault):
            return Failure(answer.reason, str(answer), origin=answer.origin)
        if answer.finish_reason == "abort":
            return Failure("aborted", "the engine gave the response up")
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
    """The rows of a prompt group, or why there are none.

    ``keeps``: by the rewards, whether the group is wanted. ``newest_only``: see `leave_older_out`.
    ``whole_only``: an episode any row of which `was_cut` is not trained on.
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
    for row in rows if newest_only else ():
        leave_older_out(row)
    cut_episodes = (
        {number for number, answer in enumerate(answers) if was_cut(answer)} if whole_only else ()
    )
    for row in rows:
        if row["episode"] in cut_episodes:
            row["loss_mask"][:] = 0
    return rows


def bad_routes(shape: RouteShape, rows: Sequence[Row]) -> Failure | None:
    """Failure of a prompt group a row of which lacks routes of ``shape``: it names the first; else
    None."""
    found = ((row, fault) for row in rows if (fault := shape.find_fault(row)))
    return next(
        (Failure(BAD_ROUTES, f"{BAD_ROUTES}: {row['row_id']}: {fault}") for row, fault in found),
        None,
    )


def leave_older_out(row: Row) -> None:
    """Train only on tokens of the version that drew the last one of ``row`` that anybody
    sampled."""
    versions = row["token_versions"]
    if len(sampled := versions[versions != NO_VERSION]):
        row["loss_mask"] *= versions == sampled[-1]


def rows_of(prompt: Prompt, ticket: int, answers: Mapping[int, Generation | Episode]) -> list[Row]:
    """The rows of episodes of a prompt group, by their numbers, but for the rewards.

    Arrays are made once for all of them, and each row has its part: of many short rows that is most
    of the work.
    """
    turns = [
        (episode, *turn)
        for episode, answer in answers.items()
        for turn in enumerate(_turns(prompt, answer))
    ]
    if not turns:
        return []
    flat = _columns([turn for *_, turn in turns])
    ends = list(accumulate(len(turn.prompt) + len(turn.generation.token_ids) for *_, turn in turns))
    return [
        {
            "row_id": row_id(ticket, episode, number),
            "prompt_id": prompt.prompt_id,
            "ticket": ticket,
            "episode": episode,
            "row": number,
            **{name: values[start:end] for name, values in flat.items()},
            "prompt_len": len(turn.prompt),
            **_media(prompt, turn),
            "finish_reason": turn.generation.finish_reason,
            **_environment(answers[episode], turn),
            **_extras(turn),
        }
        for (episode, number, turn), start, end in zip(turns, [0, *ends], ends, strict=False)
    ]


def _columns(turns: Sequence[EpisodeRow]) -> dict[str, np.ndarray]:
    """Per-token fields of all rows, end to end: tokens of no version were sampled by nobody, and
    are not trained on."""
    blank = np.zeros(max(len(turn.prompt) for turn in turns), np.float32)
    nobody = np.full(len(blank), NO_VERSION, np.int32)
    pairs = [(turn, len(turn.prompt)) for turn in turns]
    versions = np.concatenate(
        [part for turn, known in pairs for part in (nobody[:known], turn.generation.token_versions)]
    )
    logprobs = [
        part
        for turn, known in pairs
        for part in (blank[:known], np.array(turn.generation.logprobs, np.float32))
    ]
    return {
        "token_ids": np.array(
            [*chain.from_iterable((*turn.prompt, *turn.generation.token_ids) for turn in turns)],
            np.int32,
        ),
        "loss_mask": (versions != NO_VERSION).astype(np.uint8),
        "rollout_logprobs": np.concatenate(logprobs),
        "token_versions": versions.astype(np.int32, copy=False),
    }


def _turns(prompt: Prompt, answer: Generation | Episode) -> Sequence[EpisodeRow]:
    return answer.rows if isinstance(answer, Episode) else [EpisodeRow(prompt.token_ids, answer)]


def _environment(answer: Generation | Episode, turn: EpisodeRow) -> Row:
    """Field `environment` of a row, if its episode was played against one."""
    outcome = answer.outcome if isinstance(answer, Episode) else None
    return (
        {}
        if turn.turns is None
        else {"environment": {"turns": list(turn.turns), **(outcome or {})}}
    )


def _media(prompt: Prompt, turn: EpisodeRow) -> Row:
    """Fields about media: a row that does not begin with the ``prompt`` has none of its places,
    unless it says so."""
    if turn.media is not None:
        return {"spans": spans_of(turn.media)} | (
            {"media_tokens": tokens_by_id(turn.media)} if turn.media else {}
        )
    known = len(prompt.token_ids)
    if not prompt.media or tuple(turn.prompt[:known]) != prompt.token_ids:
        return {"spans": []}
    return {"spans": spans_of(prompt.media), "media_tokens": tokens_by_id(prompt.media)}


def _extras(turn: EpisodeRow) -> Row:
    """Declared fields that the engine gave beside the tokens."""
    found, known = {}, len(turn.prompt)
    for name, values in turn.generation.extras.items():
        if name in FIELDS:
            unknown = np.full((known, *values.shape[1:]), FIELDS[name].pad, values.dtype)
            before = turn.generation.before.get(name, unknown)[:known]
            both, declared = np.concatenate([before, values]), FIELDS[name].dtype
            # What may lose more than precision is left for who checks rows.
            found[name] = (
                both.astype(declared, copy=False)
                if np.can_cast(both.dtype, declared, "same_kind")
                else both
            )
    return found
