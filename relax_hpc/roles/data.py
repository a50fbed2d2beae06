"""The data role: puts the rows of a file into the queue, in place of engines that draw them. CPU
only.

Which row of the file a ticket gets depends on the seed and the ticket alone, so nothing here has to
be kept: whoever comes after a death puts the same. Rows have no age. They carry the version that
was the newest when they were put, since a version is what the queue tells lineages apart by.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Self, TypeVar

import numpy as np

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.base.versions import Version
from relax_hpc.data.examples import Example
from relax_hpc.data.media import spans_of, tokens_by_id
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.client import Admission, PublishedVersion
from relax_hpc.queue.plan import GENERATED
from relax_hpc.queue.process_context import END, HUB, NEWS, Context
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.bad_row_reports import note_bad_lines
from relax_hpc.rollout.media import UNUSABLE, PromptMedia
from relax_hpc.rollout.outcomes import Failure, Outcomes
from relax_hpc.rollout.samples import PromptSource
from relax_hpc.tasks.files import open_train
from relax_hpc.training.weights.subscriber import NOTHING

T = TypeVar("T")
FIELDS = tuple(name for name in GENERATED if name != "rollout_logprobs")
"""Fields of its rows: nobody drew them, with whatever probability."""
_AT_ONCE = 256
"""Tickets that are asked for together."""
_LONG_S = 30 * 86400.0
_FOR_NEWS = [(*NEWS, math.inf)]


def run(context: Context) -> None:
    """Serve until the run is finished."""
    client, config = context.client, context.config
    context.report_phase("reading rows")
    examples = open_train(context.run, config, load_tokenizer(context.model))
    note_bad_lines(client, examples)
    context.report_phase("")
    with ExampleMedia(context) as media:
        Feeder(context, PromptSource(examples, config), media).serve()


class ExampleMedia:
    """Media of demonstrations and pairs, decoded by worker processes and stored."""

    def __init__(self, context: Context) -> None:
        settings = context.config.data.multimodal
        # Its workers belong to an event loop.
        self._runner = asyncio.Runner()
        self._media = PromptMedia(context.client, context.model, context.run.eval_media, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._media.close())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Result of ``work``."""
        return self._runner.run(work)

    def stored_for_evaluation(self, examples: Sequence[Example]) -> list[Example]:
        """``examples`` with their media stored, in order. BadMedium: one of them cannot be used."""

        async def stored() -> list[Example]:
            return await asyncio.gather(*(self.stored(example, None) for example in examples))

        return self.run(stored())

    async def stored(self, example: Example, ticket: int | None) -> Example:
        """``example`` with its media stored for ``ticket``, or, if that is None, as those of an
        evaluation. BadMedium, BadMedia: one of them cannot be used."""
        if example.fault:
            raise example.fault
        sequences = []
        for sequence in example.sequences:
            if ticket is None:
                media = await self._media.store_for_evaluation(sequence.media)
            else:
                media = await self._media.store_for_ticket(sequence.media, ticket)
            sequences.append(replace(sequence, media=media))
        return replace(example, sequences=tuple(sequences))


class Feeder:
    """Puts the row of every ticket that it is admitted to, and follows the versions that admit
    it."""

    def __init__(self, context: Context, source: PromptSource, media: ExampleMedia) -> None:
        self.context, self.client, self.source, self.media = context, context.client, source, media
        self.outcomes = Outcomes(context.config.rollout)
        self.reader = f"{context.group}/data"
        self.newest = NOTHING
        self.news: Future[PublishedVersion | None] = self._next()
        self.asked: Future[Admission | None] = self.client.tickets.admit(self.reader, _AT_ONCE)

    def serve(self) -> None:
        """Put rows until there are no more tickets."""
        while True:
            with self.context.spans("wait", cause=HUB) as waiting:
                done, _ = wait((self.news, self.asked), return_when=FIRST_COMPLETED)
                answers = [future.result() for future in done]
                admitted = self.asked.result() if self.asked in done else None
                waiting.set_causes(
                    admitted.waited if admitted else END if None in answers else _FOR_NEWS
                )
            if None in answers:
                return
            if self.news in done:
                self._follow()
            if admitted:
                self._put(admitted)
                self.asked = self.client.tickets.admit(self.reader, _AT_ONCE)

    def _follow(self) -> None:
        """Note the version that was announced."""
        self.newest = Version.parse(self.news.result().version)
        self.client.weights.serve(self.reader, self.newest).result()
        self.news = self._next()

    def _next(self) -> Future[PublishedVersion | None]:
        """The version after the newest. It may be long in coming: the actor publishes few that
        nobody reads."""
        return self.client.weights.newer(self.newest, timeout=_LONG_S)

    def _put(self, admitted: Admission) -> None:
        step = admitted.tickets[0] // self.context.config.prompts_per_step
        with self.context.spans("queue", step=step):
            examples = self.media.run(self._examples(admitted))
            tickets = zip(admitted.tickets, examples, strict=True)
            rows = [
                row for ticket, example in tickets for row in rows_of(example, ticket, self.newest)
            ]
            refused = self.client.put_generated(rows, fields=FIELDS)
        for ticket, why in refused.items():
            print(log_entry(f"ticket {ticket}: {why}"), flush=True)
        self.context.report(step, self.client.store.plane_counts.take_metrics())

    async def _examples(self, admitted: Admission) -> list[Example]:
        """Rows of the tickets, with their media stored."""
        wanted = zip(admitted.tickets, admitted.attempts, strict=True)
        return await asyncio.gather(*(self._usable(ticket, attempt) for ticket, attempt in wanted))

    async def _usable(self, ticket: int, attempt: int) -> Example:
        """The row of a ticket; if its media cannot be used, that of the next attempt.
        NoProgressError: too many rows fail."""
        while True:
            example = self.source.prompt(ticket, attempt)
            try:
                stored = await self.media.stored(example, ticket)
            except UNUSABLE as bad:
                failure = Failure(bad.reason, f"{bad} (row {example.prompt_id})")
                self.outcomes.count(failure)
                self.outcomes.check_share(failure)
                print(
                    log_entry(f"ticket {ticket}, attempt {attempt}: {failure.detail}"), flush=True
                )
                failed = self.client.tickets.fail(ticket, attempt, failure.reason)
                attempt = (await asyncio.wrap_future(failed)).attempt
            else:
                self.outcomes.count(stored)
                return stored


def rows_of(example: Example, ticket: int, version: Version) -> Sequence[Row]:
    """Rows of a file's row, one for each sequence; the first is the one that is preferred."""
    rows = []
    for number, sequence in enumerate(example.sequences):
        row: Row = {
            "row_id": row_id(ticket, number),
            "prompt_id": example.prompt_id,
            "ticket": ticket,
            "episode": number,
            "row": 0,
            "token_ids": np.array(sequence.token_ids, np.int32),
            "prompt_len": sequence.prompt_len,
            "loss_mask": np.array(sequence.loss_mask, np.uint8),
            "token_versions": np.array(sequence.loss_mask, np.int32) * version.encode(),
            "reward": float(number == 0),
            "spans": spans_of(sequence.media),
            "finish_reason": "stop",
        }
        if sequence.media:
            row["media_tokens"] = tokens_by_id(sequence.media)
        rows.append(row)
    return rows
