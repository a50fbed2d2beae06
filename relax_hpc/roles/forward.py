"""The forward-only roles. actor_fwd computes the denominator of the clip, reference the
log-probabilities of the KL, and teacher those of distillation.

actor_fwd follows the published weights. At staleness 0 it scores step t with version t. Otherwise
it uses its newest version and writes it to `old_logprob_version`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import asdict, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.algorithms.base import drawn_tokens
from relax_hpc.base.fields import fields_by
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import ForwardConfig, TrainerConfig
from relax_hpc.queue.client import Claim, PublishedVersion, QueueClient
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.process_context import END, HUB, NEWS, Context
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.roles.profiling import StepProfiler
from relax_hpc.roles.ranks import Ranks
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch, collate_parts
from relax_hpc.training.models.families import route_shape_of_model, spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.towers.media import RowMedia
from relax_hpc.training.warm_up import connect_ranks, warm_up_batches
from relax_hpc.training.weights.node_cache import StagedFolder
from relax_hpc.training.weights.relay import relay_pays
from relax_hpc.training.weights.slab import is_slab, open_slab
from relax_hpc.training.weights.subscriber import NOTHING, Fetcher, Subscriber

_LOOK_S = 1.0
_FOR_NEWS = [(*NEWS, math.inf)]
VERSION_FIELD = "old_logprob_version"
"""Field with the version that computed `old_logprobs`."""


class Scorer:
    """The model of a forward group. It scores the rows of a claim, in all ranks."""

    def __init__(self, context: Context, ranks: Ranks, directory: Path) -> None:
        config = context.config
        self.profiler = StepProfiler(context)
        self.forward = getattr(config, context.role)
        self.ranks = ranks
        self.temperature = config.rollout.temperature
        self.top_k = config.algorithm.teacher_top_k if context.role == "teacher" else 0
        """Number of most likely tokens that are given for each token; 0: none."""
        self.scores_all_drawn = context.role == "reference" and config.algorithm.kl_in_reward > 0
        """Whether sampled tokens that are not trained are scored, too: they also have a KL
        penalty."""
        self.placeholders = read_placeholders(directory)
        # Only the policy has the routes of the engine; other models route tokens themselves.
        settings = config.model
        if context.role != "actor_fwd":
            settings = replace(settings, routing_replay="off")
        self.routes = route_shape_of_model(directory, settings)
        self.model = PolicyModel(
            read_config(directory),
            settings,
            self.forward.parallel,
            kernels=config.actor.kernels,
            # A teacher may have widths for which `grouped` does not run.
            experts="sequential" if config.actor.experts == "sequential" else "auto",
        )
        self.model.load_hf(directory)
        self._vocab = spec_from_config(read_config(context.model), config.model.ignore_keys).vocab
        """Number of tokens in the policy's vocabulary."""

    def score(self, rows: Sequence[Row]) -> list[np.ndarray]:
        """Return log-probabilities [tokens] of each row, or the result of
        `PolicyModel.forward_likeliest`. The result is complete in the leader."""
        if self.scores_all_drawn:
            rows = [row | {"loss_mask": drawn_tokens(row).astype(np.uint8)} for row in rows]
        score: Callable[[list[Batch]], list[np.ndarray] | None]
        if self.top_k:
            tail: tuple[int, ...] = (1 + 2 * self.top_k,)
            score = partial(
                self.model.forward_likeliest,
                temperature=self.temperature,
                count=self.top_k,
                vocab=self._vocab,
            )
        else:
            tail = ()
            score = partial(self.model.forward_logprobs, temperature=self.temperature)
        return score_rows(rows, self.ranks, self.model, self.forward, score, tail)

    def warm_up(self) -> None:
        """Compile kernels and connect the ranks, in all ranks."""
        connect_ranks(self.model.device)
        batches = warm_up_batches(self.model, self.forward.pack_tokens)
        self.model.forward_logprobs(batches, self.temperature)

    def load(self, staged: StagedFolder) -> None:
        """Load the weights of a folder in memory, and release the folder."""
        try:
            if is_slab(staged.path):
                self.model.load_tensors(open_slab(staged.path))
            else:
                self.model.load_hf(staged.path)
        finally:
            staged.release()


def score_rows(
    rows: Sequence[Row],
    ranks: Ranks,
    model: PolicyModel,
    settings: TrainerConfig | ForwardConfig,
    score: Callable[[list[Batch]], list[np.ndarray] | None],
    tail: tuple[int, ...] = (),
    read_media: Callable[[Sequence[Row]], RowMedia | None] | None = None,
) -> list[np.ndarray]:
    """Score rows by ``score``, which takes micro-batches of the size in ``settings``. Return
    [tokens, *tail] of each row; the result is complete in the leader.

    ``read_media`` reads the media of rows; by default they are read from the queue.
    """
    micro_batches = ranks.assign_micro_batches(rows, settings)
    own_rows = list(chain.from_iterable(micro_batches))
    media = (read_media or ranks.media)([rows[number] for number in own_rows])
    batches = collate_parts(
        rows, micro_batches, model.device, model.pack_split, model.row_fields, media=media
    )
    return ranks.collect(rows, own_rows, score(batches), tail)


def run(context: Context) -> None:
    """Serve until the run is finished."""
    config = context.config
    frozen_paths = {
        "reference": config.model.reference_path,
        "teacher": config.model.teacher_path,
    }
    frozen_path = frozen_paths.get(context.role, "")
    forward = getattr(config, context.role)
    context.report_phase("connecting its ranks")
    ranks = Ranks(context, forward.parallel)
    context.report_phase("loading the model")
    scorer = Scorer(context, ranks, Path(frozen_path) if frozen_path else context.model)
    if forward.warm_up:
        context.report_phase("warming up kernels and connections")
        scorer.warm_up()
    context.report_phase("")
    if context.world.is_leader:
        refresh = {"actor_fwd": 1, "reference": config.algorithm.kl.refresh_every}
        _lead(context, ranks, scorer, refresh.get(context.role, 0))
    else:
        _follow(context, ranks, scorer)
    scorer.profiler.close()
    ranks.close()


def _follow(context: Context, ranks: Ranks, scorer: Scorer) -> None:
    relays: list[dict[str, Any]] = []
    get_relays = (lambda *_: relays) if relay_pays(context.config) else None
    fetcher = Fetcher(context.run, ranks.reader.planes, context.config.weights, get_relays)
    while True:
        command = _next_command(context, ranks)
        if command["do"] == "end":
            return
        if command["do"] == "load":
            relays = command["relays"]
            with context.spans("weights"):
                scorer.load(fetcher.fetch_in_time(PublishedVersion(**command["news"])))
                fetcher.forget_before(command["news"]["version"])
        else:
            claim = Claim.from_message(command["claim"])
            scorer.profiler.reach(claim.step)
            with context.spans("queue", step=claim.step):
                rows = ranks.rows(claim, ranks.control)
            if rows is not None:
                with context.spans("forward", step=claim.step):
                    scorer.score(rows)


def _next_command(context: Context, ranks: Ranks) -> dict[str, Any]:
    """Wait for the next command of the leader. The leader waits for the same cause."""
    with context.spans("wait", cause=HUB) as waiting:
        command = ranks.tell(None)
        waiting.set_causes(command["claim"]["waited"] if command["do"] == "score" else _FOR_NEWS)
    return command


def _lead(context: Context, ranks: Ranks, scorer: Scorer, every: int) -> None:
    client, role = context.client, context.role
    assert client is not None
    budget = scorer.forward.pack_tokens * scorer.forward.parallel.data
    weights = _Weights(context, ranks, scorer, every) if every else None
    work: Future = client.submit_claim(role, budget)
    while True:
        with context.spans("wait", cause=HUB) as waiting:
            futures = [work, weights.news] if weights else [work]
            while not wait(futures, _LOOK_S, FIRST_COMPLETED).done:
                ranks.control.extend_wait()
            waiting.set_causes(_waited(work.result()) if work.done() else _FOR_NEWS)
        if weights and weights.news.done():
            weights.pull()
        if not work.done():
            continue
        claim = work.result()
        if claim is None:
            break
        if weights and not weights.fit(claim):
            client.return_claim(claim)
            # No other process could score these rows earlier.
            with context.spans("wait", cause=NEWS):
                wait([weights.news], timeout=_LOOK_S)
            work = client.submit_claim(role, budget)
            continue
        scorer.profiler.reach(claim.step)
        with context.spans("queue", step=claim.step):
            rows = _read(client, ranks, scorer, claim)
        if rows is None:
            work = client.submit_claim(role, budget)
            continue
        with context.spans("forward", step=claim.step):
            scores = scorer.score(rows)
        version = weights.reader.serving if weights and weights.holds else None
        with context.spans("queue", step=claim.step):
            _put(client, role, rows, scores, claim, version)
        work = client.submit_claim(role, budget)
        context.report(claim.step, ranks.reader.plane_counts.take_metrics())
    ranks.tell({"do": "end"})


def _read(client: QueueClient, ranks: Ranks, scorer: Scorer, claim: Claim) -> list[Row] | None:
    """Return the rows of ``claim``, which all ranks then have. Return None if the claim was given
    back, because some rows cannot be read."""
    if not ranks.control.run_while_others_wait(
        lambda: check_claim(client, claim, scorer.placeholders, scorer.routes)
    ):
        return None
    ranks.tell({"do": "score", "claim": claim.message()})
    return ranks.rows(claim, ranks.control)


def _waited(claim: Claim | None) -> Sequence[tuple[str, str, float]]:
    return claim.waited if claim else END


def _put(
    client: QueueClient,
    role: str,
    rows: list[Row],
    scores: list[np.ndarray],
    claim: Claim,
    version: Version | None,
) -> None:
    """Put the scores by ``version`` of the policy, or by a model whose weights are frozen
    (None)."""
    extra = {VERSION_FIELD: version.encode()} if version else {}
    row_fields = [_score_fields(fields_by(role)[0], score) | extra for score in scores]
    scored = [
        {"row_id": row["row_id"], **fields} for row, fields in zip(rows, row_fields, strict=True)
    ]
    client.put(scored, tuple(row_fields[0]), claim)


def _score_fields(name: str, score: np.ndarray) -> dict[str, Any]:
    """Return the fields of a score: the log-probabilities ``name``, or all results of
    `PolicyModel.forward_likeliest`."""
    if score.ndim == 1:
        return {name: score}
    logprobs, top, ids = np.split(score, (1, (score.shape[1] + 1) // 2), axis=1)
    return {
        name: logprobs[:, 0],
        "teacher_top_logprobs": top,
        "teacher_top_ids": ids.astype(np.int32),
    }


class _Weights:
    """The leader's subscription to versions of the policy. An actor_fwd group reads every version,
    a reference one of every ``every`` versions."""

    def __init__(self, context: Context, ranks: Ranks, scorer: Scorer, every: int) -> None:
        assert context.client is not None
        self.context, self.ranks, self.scorer, self.every = context, ranks, scorer, every
        self.holds = context.role == "actor_fwd"
        """Whether the versions in use are kept for this role. For a reference the newest due
        version is always kept."""
        planes, settings = ranks.reader.planes, context.config.weights
        # A reference would keep a version in memory for its readers until its next version.
        relays = self.holds and relay_pays(context.config)
        self.reader = Subscriber(
            context.run, context.client, context.group, planes, settings, every, relays=relays
        )
        self.news = self.reader.newer()
        while self.holds and self.reader.serving == NOTHING and self._await_news():
            self.pull()

    def _await_news(self) -> PublishedVersion | None:
        with self.context.spans("wait", cause=NEWS):
            while not wait([self.news], _LOOK_S).done:
                self.ranks.control.extend_wait()
            return self.news.result()

    def pull(self) -> None:
        """Load the announced version in all ranks."""
        announced = self.news.result()
        if announced is None:
            self.news = Future()
            return
        with self.context.spans("weights"):
            fetched = self.reader.fetch(announced)
            if fetched:
                news, staged = fetched
                if self.ranks.size > 1:
                    relays = self.reader.fetcher.relay_folders(news)
                    self.ranks.tell({"do": "load", "news": asdict(news), "relays": relays})
                self.scorer.load(staged)
                self._note_served(Version.parse(news.version))
        self.news = self.reader.newer()

    def _note_served(self, version: Version) -> None:
        if self.holds:
            self.reader.served(version)
        else:
            self.reader.serving = version
            self.reader.fetcher.forget_before(str(version))

    def fit(self, claim: Claim) -> bool:
        """Whether the rows of ``claim`` can be scored with the loaded version.

        If not, there are two cases. The version that sampled the rows is announced before the claim
        can be given back. Or the rows are older than a rollback and are already dropped. No process
        therefore waits for a version while it holds a claim. Such a wait could block the actor,
        which may have to train first on earlier rows that need scores.
        """
        serving = self.reader.serving
        if not self.holds:
            return serving.number // self.every >= claim.min_version // self.every
        return serving != NOTHING and serving.number >= claim.min_version
