"""Report of a training step: scalars for metrics.jsonl and TensorBoard."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from relax_hpc.algorithms.correction import effective_share
from relax_hpc.algorithms.losses import MAX_SUFFIX, PER_WEIGHT
from relax_hpc.data.multimodal.medium import Grid, Kind
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.client import StepTrained
from relax_hpc.queue.row_schema import NO_VERSION, Row, nest_rows
from relax_hpc.training.models.flops import training_flops
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.towers.media import RowMedia
from relax_hpc.training.ratio_tail import QUANTILES


class StepTally:
    """Sums over the episodes of a step, for the metrics."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        """Sampled tokens in all rows of each episode."""
        self.ends = Counter[str]()
        """Number of episodes by the reason of their end, see `finish_reason` of rows."""
        self.compared = self.equal = 0
        """Number of prompt groups with two or more episodes, and number of those whose rewards are
        all equal."""
        self.turns = self.heard = 0
        """Number of turns of the policy, and of tokens between the turns that it did not sample."""
        self.row_tokens: list[int] = []
        """Tokens of each row, sampled or not."""
        self.media: dict[str, tuple[Kind, Grid]] = {}
        """Kinds and grids of the media of this rank's rows, by their ids. After `gather` the leader
        has those of all ranks."""
        self.routes = np.zeros(2)
        """Number of routes that equal the trainer's own routes, and number of all routes; in the
        leader."""

    def add(self, rows: list[Row], media: RowMedia | None = None) -> None:
        """Count rows of whole prompt groups, in the order of their ids, and ``media`` of some of
        them."""
        inputs = media.inputs if media else {}
        self.media |= {name: (medium.kind, medium.grid) for name, medium in inputs.items()}
        prompts = nest_rows(rows)
        for prompt in prompts:
            rewards = {float(episode[0]["reward"]) for episode in prompt}
            self.compared += len(prompt) > 1
            self.equal += len(prompt) > 1 and len(rewards) == 1
        episodes = list(chain.from_iterable(prompts))
        if not episodes:
            return
        ordered = list(chain.from_iterable(episodes))
        counts = row_counts(ordered)
        first_rows = np.cumsum([0, *(len(episode) for episode in episodes[:-1])])
        self.rewards += [float(episode[0]["reward"]) for episode in episodes]
        self.lengths += np.add.reduceat(counts.sampled, first_rows).tolist()
        self.ends.update(episode[-1]["finish_reason"] for episode in episodes)
        self.row_tokens += [len(row["token_ids"]) for row in ordered]
        self.turns += counts.turns
        self.heard += counts.heard

    def gather(self, channel: RankChannel) -> None:
        """Collect the media of all ranks in the leader. Collective."""
        for media in channel.gather(self.media) or ():
            self.media |= {name: (Kind(kind), (*grid,)) for name, (kind, grid) in media.items()}

    def merge(self, other: StepTally) -> None:
        """Add the counts of ``other``."""
        self.rewards += other.rewards
        self.lengths += other.lengths
        self.ends += other.ends
        self.compared += other.compared
        self.equal += other.equal
        self.turns += other.turns
        self.heard += other.heard
        self.row_tokens += other.row_tokens
        self.media |= other.media
        self.routes += other.routes


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Numbers of tokens in rows."""

    sampled: np.ndarray
    """Sampled tokens of each row [rows]."""
    turns: int
    """Number of runs of sampled tokens after the prompts, over all rows."""
    heard: int
    """Number of tokens after the prompts that were not sampled, over all rows."""


def row_counts(rows: Sequence[Row]) -> RowCounts:
    """Count the tokens of all ``rows``, at least one, in a few calls of numpy. Separate calls for
    each row would take longer than the counting itself."""
    lengths = np.array([len(row["token_versions"]) for row in rows])
    prompts = np.array([row["prompt_len"] for row in rows])
    starts = np.cumsum(lengths) - lengths
    sampled = np.concatenate([row["token_versions"] for row in rows]) != NO_VERSION
    begins = np.repeat(starts + prompts, lengths)
    response = np.arange(len(sampled)) >= begins
    sampled_before = np.concatenate(([False], sampled[:-1]))
    sampled_before[np.minimum(starts + prompts, len(sampled) - 1)] = False
    turns = int(np.count_nonzero(sampled & response & ~sampled_before))
    heard = int(np.count_nonzero(response & ~sampled))
    return RowCounts(np.add.reduceat(sampled.astype(np.int64), starts), turns, heard)


def staleness_report(answer: StepTrained) -> dict[str, float]:
    """Return scalars from the queue's answer for a step: the age of its tokens, and the lag of
    readers."""
    staleness = answer.staleness
    return {
        "staleness/min": min(staleness),
        "staleness/mean": sum(staleness) / len(staleness),
        "staleness/max": max(staleness),
        "weights/publish_lag": max(0, answer.lag),
    }


_RENAMED = {
    "ratio": "loss/ratio",
    "clip_fraction": "loss/clip_fraction",
    "entropy": "loss/entropy_nats",
    "sampled_entropy": "loss/sampled_entropy_nats",
    "zero_advantage": "loss/zero_advantage_share",
    "grad_norm": "loss/grad_norm",
    "skipped": "loss/skipped_updates",
    "empty": "loss/empty_updates",
}
_COUNTS = ("skipped", "empty")
"""Metrics of an update that are summed over the updates of a step."""
_WITH_LARGEST = ("loss/grad_norm", "loss/clip_fraction", "kl/old")
"""Metrics whose largest value is reported, too, if a step has several updates."""


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the metrics of several updates of a step as one value each.

    Counts are summed. Of maxima, and of quantiles, which have no mean, the largest value is used.
    All other values are means, weighted as in the metric of an update itself: by tokens, or by the
    `weight` of the loss. Means and maxima leave out updates without a trained token and values that
    are not finite; `empty` and `skipped` count such updates.
    """
    names = dict.fromkeys(chain.from_iterable(updates))
    return {
        name: _over_updates(name, [update for update in updates if name in update])
        for name in names
    }


def _over_updates(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    """Return one value of the metric ``name``, which all ``updates`` have."""
    if name in _COUNTS:
        return sum(update[name] for update in updates)
    usable = [
        update for update in updates if math.isfinite(update[name]) and not update.get("empty")
    ]
    if not usable:
        return updates[0][name]
    values = [update[name] for update in usable]
    if name.endswith(MAX_SUFFIX) or name in QUANTILES:
        return max(values)
    unit = "weight" if name.startswith(PER_WEIGHT) else "tokens"
    weights = [1.0 if name == "grad_norm" else update.get(unit, 1.0) for update in usable]
    return float(np.average(values, weights=weights))


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a step's updates."""

    updates: Sequence[dict[str, float]]
    """Metrics of each update (`Trainer.step`) in order."""
    first_pass: int
    """Number of updates of the first pass, after which each row was trained on once."""
    tally: StepTally
    lr: float
    """Learning rate of the step."""
    seconds: float
    """Duration of the step."""

    def of_first_pass(self) -> dict[str, float]:
        """Return the metrics of the first pass, in which each row counts once."""
        return over_updates(self.updates[: self.first_pass])

    def values(self) -> dict[str, float]:
        """Return the scalars of any trainer."""
        values = _renamed(over_updates(self.updates))
        if len(self.updates) > 1:
            renamed_updates = [_renamed(update) for update in self.updates]
            for name in _WITH_LARGEST:
                numbers = [update.get(name, math.nan) for update in renamed_updates]
                finite = [number for number in numbers if math.isfinite(number)]
                if finite:
                    values[name + MAX_SUFFIX] = max(finite)
        return values | {
            "loss/lr": self.lr,
            "perf/step_s": self.seconds,
            "perf/trained_tokens": sum(self.tally.row_tokens),
        }


def _renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return ``metrics`` of updates by their tags, without those that have no tag."""
    tags = {_RENAMED.get(name, name): value for name, value in metrics.items()}
    return {tag: value for tag, value in tags.items() if "/" in tag}


def mfu_report(
    result: StepResult,
    spec: ModelSpec,
    passes: int,
    peak: float | None,
    frozen: Collection[str] = (),
) -> dict[str, float]:
    """Return the achieved share of ``peak``, the operations per second of all ranks together, for a
    step's ``passes`` over its rows.

    The whole duration of the step counts, including waits for rows. ``frozen`` towers have only a
    forward pass. The result is empty if the peak is unknown.
    """
    if not peak:
        return {}
    flops = training_flops(spec, result.tally.row_tokens, result.tally.media.values(), frozen)
    return {"perf/mfu": passes * flops / (result.seconds * peak)}


def policy_values(result: StepResult) -> dict[str, float]:
    """Return the scalars of a policy's step.

    Comparisons of rollout and old log-probabilities are of the first pass, in which each row counts
    once. `drift` is measured in the first update, before its change of the weights: it shows the
    change since the old log-probabilities were computed, without the changes by the step's updates.
    `parity/*` are differences, in nats, of the log-probabilities of two engines for the same
    tokens; they are no KL.
    """
    first, rows, tally = result.updates[0], result.of_first_pass(), result.tally
    count = len(tally.rewards)
    mean = sum(tally.rewards) / count
    values = result.values() | {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in tally.rewards) / count) ** 0.5,
        "reward/response_tokens": sum(tally.lengths) / count,
        "reward/stopped_share": (tally.ends["stop"] + tally.ends["env_done"]) / count,
    }
    if tally.compared:
        values["reward/zero_std_share"] = tally.equal / tally.compared
    values |= turns_report(tally)
    values |= {
        "parity/logprob_abs_diff": rows.get("train_rollout_logprob_abs_diff", 0.0),
        "parity/logprob_max": rows.get("train_rollout_logprob_max", 0.0),
        "parity/ratio_p99": rows.get("train_rollout_ratio_p99", 1.0),
        "parity/ratio_p999": rows.get("train_rollout_ratio_p999", 1.0),
        "kl/rollout": rows.get("rollout_kl", 0.0),
        "kl/drift": first.get("kl/old", 0.0),
        "loss/clip_fraction_drift": first.get("clip_fraction", 0.0),
    }
    values |= correction_report(rows)
    if tally.routes[1]:
        values["r3/routes_equal"] = float(tally.routes[0] / tally.routes[1])
    return values


def turns_report(tally: StepTally) -> dict[str, float]:
    """Return the scalars of episodes of several turns; empty if every episode is one response."""
    count = len(tally.rewards)
    # A row of an agent program may have one response and no tokens after it.
    if not tally.heard and set(tally.ends) <= {"stop", "length"}:
        return {}
    means = {"turns": tally.turns, "rows": len(tally.row_tokens), "heard_tokens": tally.heard}
    ends = {f"ended_{reason}": number for reason, number in tally.ends.items()}
    return {f"episodes/{name}": total / count for name, total in {**means, **ends}.items()}


def correction_report(metrics: dict[str, float]) -> dict[str, float]:
    """Return metrics of the distance between the engine's policy and the old one, and of the
    off-policy correction.

    `correction/effective_share` is the effective sample size as a share of the tokens: this share
    of tokens, sampled by the old policy itself, would contain the same information.
    """
    inverse = metrics.get("rollout_inverse_ratio_max", 0.0)
    weight = metrics.get("correction_weight", 0.0)
    return {
        "correction/weight": weight,
        "correction/cut_share": metrics.get("correction_cut", 0.0),
        "correction/effective_share": effective_share(
            weight, metrics.get("correction_square", 0.0)
        ),
        "correction/ratio_min": 1.0 / inverse if inverse else 0.0,
        "correction/ratio_max": metrics.get("rollout_ratio_max", 0.0),
    }
