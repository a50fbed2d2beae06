"""The data role: puts the rows of a file into the queue, in place of engines that draw them. CPU only.

Which row of the file a ticket gets depends on the seed and the ticket alone, so nothing here has to be kept: whoever
comes after a death puts the same. Rows have no age. They carry the version that was the newest when they were put,
since a version is what the queue tells lineages apart by.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait

import numpy as np

from relax_hpc.data.examples import Example
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.roles.context import END, HUB, NEWS, Context
from relax_hpc.rollout.bad_lines import note_bad_lines
from relax_hpc.rollout.samples import PromptSource
from relax_hpc.tasks.files import open_train
from relax_hpc.transfer_queue.client import Admission, News
from relax_hpc.transfer_queue.plan import GENERATED
from relax_hpc.transfer_queue.row_ids import row_id
from relax_hpc.transfer_queue.row_schema import Row
from relax_hpc.versions import Version
from relax_hpc.weights.subscriber import NOTHING

FIELDS = tuple(name for name in GENERATED if name != "rollout_logprobs")
"""Fields of its rows: nobody drew them, with whatever probability."""
_AT_ONCE = 256
"""Tickets that are asked for together."""
_LONG_S = 30 * 86400.0
_FOR_NEWS = [(*NEWS, math.inf)]


def run(context: Context) -> None:
    """Serve until the run is finished."""
    client, config = context.client, context.config
    context.says("reading rows")
    examples = open_train(context.run, config, load_tokenizer(context.model))
    note_bad_lines(client, examples)
    context.says("")
    Feeder(context, PromptSource(examples, config)).serve()


class Feeder:
    """Puts the row of every ticket that it is admitted to, and follows the versions by which it is."""

    def __init__(self, context: Context, source: PromptSource) -> None:
        self.context, self.client, self.source = context, context.client, source
        self.reader = f"{context.group}/data"
        self.newest = NOTHING
        self.news: Future[News | None] = self._next()
        self.asked: Future[Admission | None] = self.client.tickets.admit(self.reader, _AT_ONCE)

    def serve(self) -> None:
        """Put rows until there are no more tickets."""
        while True:
            with self.context.spans("wait", cause=HUB) as waiting:
                done, _ = wait((self.news, self.asked), return_when=FIRST_COMPLETED)
                answers = [future.result() for future in done]
                admitted = self.asked.result() if self.asked in done else None
                waiting.because(admitted.waited if admitted else END if None in answers else _FOR_NEWS)
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

    def _next(self) -> Future[News | None]:
        """The version after the newest. It may be long in coming: the actor publishes few that nobody reads."""
        return self.client.weights.newer(self.newest, timeout=_LONG_S)

    def _put(self, admitted: Admission) -> None:
        step = admitted.tickets[0] // self.context.config.prompts_per_step
        with self.context.spans("queue", step=step):
            wanted = zip(admitted.tickets, admitted.attempts, strict=True)
            found = [(ticket, self.source.prompt(ticket, attempt)) for ticket, attempt in wanted]
            rows = [row for ticket, example in found for row in rows_of(example, ticket, self.newest)]
            refused = self.client.put(rows, FIELDS)
        for ticket, why in refused.items():
            print(f"ticket {ticket}: {why}", flush=True)
        self.context.report(step, self.client.store.ways.since_last())


def rows_of(example: Example, ticket: int, version: Version) -> Sequence[Row]:
    """Rows of a file's row, one for each sequence; the first is the one that is preferred."""
    return [
        {
            "row_id": row_id(ticket, number),
            "prompt_id": example.prompt_id,
            "ticket": ticket,
            "episode": number,
            "row": 0,
            "token_ids": np.array(one.token_ids, np.int32),
            "prompt_len": one.prompt_len,
            "loss_mask": np.array(one.loss_mask, np.uint8),
            "token_versions": np.array(one.loss_mask, np.int32) * version.encode(),
            "reward": float(number == 0),
            "spans": [],
            "finish_reason": "stop",
        }
        for number, one in enumerate(example.sequences)
    ]
