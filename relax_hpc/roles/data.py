"""The data role: puts the rows of a file into the queue, instead of engines that generate rows. It
needs no GPU.

The row of a ticket depends only on the seed and the ticket, so no state is stored: after a restart
the role puts the same rows. Rows have no age. They carry the version that was the newest when they
were put, because the queue identifies the lineage of rows by a version.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import replace
from typing import Any, Self, TypeVar, cast

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
from relax_hpc.rollout.bad_row_reports import report_bad_rows
from relax_hpc.rollout.media import UNUSABLE, PromptMedia
from relax_hpc.rollout.outcomes import Failure, Outcomes
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.tasks.files import open_train
from relax_hpc.training.weights.subscriber import NOTHING

T = TypeVar("T")
FIELDS = tuple(name for name in GENERATED if name != "rollout_logprobs")
"""Fields of its rows. No policy sampled them, so they have no log-probabilities."""
_MAX_TICKETS = 256
"""Maximum number of tickets in one request."""
_LONG_S = 30 * 86400.0
_FOR_NEWS = [(*NEWS, math.inf)]


def run(context: Context) -> None:
    """Serve until the run is finished."""
    client, config = context.client, context.config
    context.report_phase("reading rows")
    examples = open_train(context.run, config, load_tokenizer(context.model))
    assert client is not None
    report_bad_rows(client, examples)
    context.report_phase("")
    with ExampleMedia(context) as media:
        Feeder(context, PromptSource(examples, config), media).serve()


class ExampleMedia:
    """Media of demonstrations and pairs, decoded by worker processes and stored."""

    def __init__(self, context: Context) -> None:
        settings = context.config.data.multimodal
        # The media workers belong to an event loop.
        self._runner = asyncio.Runner()
        self._media = PromptMedia(context.client, context.model, context.run.eval_media, settings)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.run(self._media.close())
        self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of ``work``."""
        return self._runner.run(work)

    def stored_for_evaluation(self, examples: Sequence[Example]) -> list[Example]:
        """Store the media of ``examples`` and return them in order. UnusableMedium: a medium cannot
        be used."""

        async def stored() -> list[Example]:
            return await asyncio.gather(*(self.stored(example, None) for example in examples))

        return self.run(stored())

    async def stored(self, example: Example, ticket: int | None) -> Example:
        """Return ``example`` with its media stored for ``ticket`` or, if it is None, for
        evaluation. UnusableMedium, MediaMismatch: a medium cannot be used."""
        if example.media_error:
            raise example.media_error
        sequences = []
        for sequence in example.sequences:
            if ticket is None:
                media = await self._media.store_for_evaluation(sequence.media)
            else:
                media = await self._media.store_for_ticket(sequence.media, ticket)
            sequences.append(replace(sequence, media=media))
        return replace(example, sequences=tuple(sequences))


class Feeder:
    """Puts the rows of every admitted ticket, and reports the versions that admit further
    tickets."""

    def __init__(self, context: Context, source: PromptSource, media: ExampleMedia) -> None:
        assert context.client is not None
        self.context, self.client, self.source, self.media = context, context.client, source, media
        self.outcomes = Outcomes(context.config.rollout)
        self.reader = f"{context.group}/data"
        self.newest = NOTHING
        self.news: Future[PublishedVersion | None] = self._await_version()
        self.admission: Future[Admission | None] = self._request_tickets()

    def serve(self) -> None:
        """Put rows until there are no more tickets."""
        while True:
            with self.context.spans("wait", cause=HUB) as waiting:
                futures: list[Future[Any]] = [self.news, self.admission]
                done, _ = wait(futures, return_when=FIRST_COMPLETED)
                is_over = any(future.result() is None for future in done)
                admitted = self.admission.result() if self.admission in done else None
                if admitted:
                    waiting.set_causes(admitted.waited)
                else:
                    waiting.set_causes(END if is_over else _FOR_NEWS)
            if is_over:
                return
            news = self.news.result() if self.news in done else None
            if news:
                self._follow(news)
            if admitted:
                self._put(admitted)
                self.admission = self._request_tickets()

    def _request_tickets(self) -> Future[Admission | None]:
        return self.client.tickets.admit(self.reader, _MAX_TICKETS)

    def _follow(self, news: PublishedVersion) -> None:
        """Report the announced version as served, and wait for the next one."""
        self.newest = Version.parse(news.version)
        self.client.weights.serve(self.reader, self.newest).result()
        self.news = self._await_version()

    def _await_version(self) -> Future[PublishedVersion | None]:
        """Return the version after the newest one. It may take long: without readers the actor
        publishes few versions."""
        return self.client.weights.newer(self.newest, timeout=_LONG_S)

    def _put(self, admitted: Admission) -> None:
        step = admitted.tickets[0] // self.context.config.prompts_per_step
        with self.context.spans("queue", step=step):
            examples = self.media.run(self._examples(admitted))
            rows: list[Row] = []
            for ticket, example in zip(admitted.tickets, examples, strict=True):
                rows += rows_of(example, ticket, self.newest)
            refused = self.client.put_generated(rows, fields=FIELDS)
        for ticket, reason in refused.items():
            print(log_entry(f"ticket {ticket}: {reason}"), flush=True)
        self.context.report(step, self.client.store.plane_counts.take_metrics())

    async def _examples(self, admitted: Admission) -> list[Example]:
        """Return the examples of the tickets, with their media stored."""
        attempts = zip(admitted.tickets, admitted.attempts, strict=True)
        return await asyncio.gather(
            *(self._usable(ticket, attempt) for ticket, attempt in attempts)
        )

    async def _usable(self, ticket: int, attempt: int) -> Example:
        """Return the example of a ticket. If its media cannot be used, return that of the next
        attempt. NoProgressError: too many examples fail."""
        while True:
            # The source gives examples, not prompts, if the algorithm learns from files.
            example = cast(Example, self.source.prompt(ticket, attempt))
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
    """Return the queue's rows of a file's row, one per sequence. The first is the preferred one."""
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
