"""The forward-only roles: actor_fwd gives the clip's denominator, reference gives the KL's.

actor_fwd follows the published weights. At staleness 0 it scores step t with version t; otherwise with the newest it
has, and says which in `old_logprob_version`.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from pathlib import Path

import numpy as np

from relax_hpc.roles.context import Context
from relax_hpc.roles.ranks import Ranks
from relax_hpc.training.batches import PAD, collate, split_rows
from relax_hpc.training.hf_files import read_config
from relax_hpc.training.model import PolicyModel
from relax_hpc.transfer_queue.claims import check_claim
from relax_hpc.transfer_queue.client import Claim, QueueClient
from relax_hpc.transfer_queue.media import placeholders_of
from relax_hpc.transfer_queue.schema import Row
from relax_hpc.versions import Version
from relax_hpc.weights.manifest import TENSORS, read_verified
from relax_hpc.weights.subscriber import NOTHING, Subscriber

VERSION_FIELD = "old_logprob_version"


class Scorer:
    """The model of a forward group and how it scores the rows of a claim, in all ranks."""

    def __init__(self, context: Context, ranks: Ranks, directory: Path) -> None:
        config = context.config
        self.forward = getattr(config, context.role)
        self.ranks = ranks
        self.temperature = config.rollout.temperature
        self.placeholders = placeholders_of(directory)
        self.model = PolicyModel(read_config(directory), config.model, self.forward.parallel)
        self.model.load_hf(directory)

    def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Log-probabilities [tokens] of each row; complete in the leader."""
        mine = self.ranks.mine(rows)
        parts = split_rows([rows[index] for index in mine], self.forward.max_tokens_per_micro_batch)
        multiple = self.model.length_multiple
        batches = [collate(part, PAD, self.model.device, multiple) for part in parts]
        return self.ranks.collect(rows, mine, self.model.forward_logprobs(batches, self.temperature))

    def load(self, data: bytes) -> None:
        """Take the weights of a safetensors file."""
        from safetensors.torch import load

        self.model.load_tensors(load(data))


def run(context: Context) -> None:
    """Serve until the run is finished."""
    follows = context.role == "actor_fwd"
    config = context.config
    frozen = Path(config.model.reference_path) if config.model.reference_path and not follows else context.model
    forward = getattr(config, context.role)
    ranks = Ranks(context, forward.parallel)
    scorer = Scorer(context, ranks, frozen)
    if context.world.leader:
        _lead(context, ranks, scorer, follows)
    else:
        _follow(context, ranks, scorer)
    ranks.close()


def _follow(context: Context, ranks: Ranks, scorer: Scorer) -> None:
    while (command := ranks.tell(None))["do"] != "end":
        if command["do"] == "load":
            scorer.load(read_verified(context.run.weights / command["version"], command["digest"])[TENSORS])
        else:
            scorer.score(ranks.rows(Claim.of(command["claim"])))


def _lead(context: Context, ranks: Ranks, scorer: Scorer, follows: bool) -> None:
    client, role = context.client, context.role
    assert client is not None
    budget = scorer.forward.max_tokens_per_micro_batch * scorer.forward.parallel.data
    weights = _Weights(context, ranks, scorer) if follows else None
    work: Future = client.claim_later(role, budget)
    while True:
        with context.spans("wait"):
            wait([work, *([weights.news] if weights else [])], return_when=FIRST_COMPLETED)
        if weights and weights.news.done():
            weights.pull()
        if not work.done():
            continue
        claim = work.result()
        if claim is None:
            break
        fits = weights is None or weights.fit(claim)
        if not fits:
            client.give_back(claim)
        if not fits or not check_claim(client, claim, scorer.placeholders):
            work = client.claim_later(role, budget)
            continue
        ranks.tell({"do": "score", "claim": claim.message()})
        with context.spans("queue", step=claim.step):
            rows = ranks.rows(claim)
        with context.spans("forward", step=claim.step):
            scores = scorer.score(rows)
        with context.spans("queue", step=claim.step):
            _put(client, rows, scores, claim, weights.reader.serving if weights else None)
        work = client.claim_later(role, budget)
        context.report(claim.step, ranks.reader.ways.since_last())
    ranks.tell({"do": "end"})


def _put(client: QueueClient, rows: list[Row], scores: list[np.ndarray], claim: Claim, version: Version | None) -> None:
    """Put the scores by actor_fwd's ``version``, or by the reference."""
    field, extra = ("old_logprobs", {VERSION_FIELD: version.encode()}) if version else ("ref_logprobs", {})
    made = [{"sample_id": row["sample_id"], field: score, **extra} for row, score in zip(rows, scores, strict=True)]
    client.put(made, (field, *extra), claim)


class _Weights:
    """The leader's subscription of an actor_fwd group."""

    def __init__(self, context: Context, ranks: Ranks, scorer: Scorer) -> None:
        self.context, self.ranks, self.scorer = context, ranks, scorer
        self.reader = Subscriber(context.run, context.client, context.group)
        self.news = self.reader.newer()
        with context.spans("wait"):
            wait([self.news])
        self.pull()

    def pull(self) -> None:
        """Load the announced version in all ranks."""
        announced = self.news.result()
        if "version" not in announced:
            self.news = Future()
            return
        with self.context.spans("weights"):
            announced, data = self.reader.read(announced)
            if self.ranks.size > 1:
                self.ranks.tell({"do": "load", "version": announced["version"], "digest": announced["digest"]})
            self.scorer.load(data)
            self.reader.served(Version.parse(announced["version"]))
        self.news = self.reader.newer()

    def fit(self, claim: Claim) -> bool:
        """Whether the rows of ``claim`` can be scored with what is loaded.

        If not, either the version that made them is announced before the claim could be given back, or they were made
        before a rollback and are dropped already. So nobody waits for a version while holding a claim: the actor might
        have to train on earlier rows first, which need scores.
        """
        return self.reader.serving != NOTHING and self.reader.serving.number >= claim.min_version
