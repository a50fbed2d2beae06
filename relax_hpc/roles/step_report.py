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


class Tally:
    """Sums over the step's episodes, for the metrics."""

    def __init__(self) -> None:
        self.rewards: list[float] = []
        self.lengths: list[int] = []
        """Tokens that the policy sampled, in all rows of an episode."""
        self.ends = Counter[str]()
        """Episodes by how they ended, see `finish_reason` of rows."""
        self.compared = self.equal = 0
        """Prompt groups of two episodes or more, and those of them whose rewards are all equal."""
        self.turns = self.heard = 0
        """Turns of the policy, and tokens that others said between them."""
        self.row_tokens: list[int] = []
        """Tokens of each row, those included that nobody sampled."""
        self.media: dict[str, tuple[Kind, Grid]] = {}
        """Kinds and grids of the media of this rank's rows, by their ids; of all ranks', once they
        are gathered."""
        self.routes = np.zeros(2)
        """Routes that are the trainer's own too, and all that came with the rows; in the leader."""

    def add(self, rows: list[Row], media: RowMedia | None = None) -> None:
        """Count rows of whole prompt groups, in the order of their ids, and ``media`` of some."""
        inputs = media.inputs if media else {}
        self.media |= {name: (one.kind, one.grid) for name, one in inputs.items()}
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
        """Have the media of all ranks in the leader. Collective."""
        for media in channel.gather(self.media) or ():
            self.media |= {name: (Kind(kind), (*grid,)) for name, (kind, grid) in media.items()}

    def join(self, other: Tally) -> None:
        """Count what ``other`` has counted too."""
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
    """Tokens that the policy sampled, of each row [rows]."""
    turns: int
    """Stretches of sampled tokens behind the prompts, of all rows."""
    heard: int
    """Tokens behind the prompts that the policy did not sample, of all rows."""


def row_counts(rows: Sequence[Row]) -> RowCounts:
    """Count the tokens of all ``rows``, at least one, in a few calls of numpy. Calls for each row
    would cost more than the counting."""
    lengths = np.array([len(row["token_versions"]) for row in rows])
    prompts = np.array([row["prompt_len"] for row in rows])
    starts = np.cumsum(lengths) - lengths
    sampled = np.concatenate([row["token_versions"] for row in rows]) != NO_VERSION
    begins = np.repeat(starts + prompts, lengths)
    response = np.arange(len(sampled)) >= begins
    sampled_before = np.concatenate(([False], sampled[:-1]))
    sampled_before[np.minimum(starts + prompts, len(sampled) - 1)] = False
    turns = np.count_nonzero(sampled & response & ~sampled_before)
    heard = np.count_nonzero(response & ~sampled)
    return RowCounts(np.add.reduceat(sampled.astype(np.int64), starts), turns, heard)


def staleness_report(answer: StepTrained) -> dict[str, float]:
    """Scalars of what the queue says of a step: how old its tokens were, how far behind readers
    are."""
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
"""Metrics of an update that are added up over those of a step."""
_WITH_LARGEST = ("loss/grad_norm", "loss/clip_fraction", "kl/old")
"""Metrics whose largest value is reported too, if a step has several updates."""


def over_updates(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Metrics of several updates of a step as one value each.

    Counts are added up. Of maxima the largest counts, and of quantiles, which have no mean. All
    others are means, over what the metric of an update is a mean over itself: tokens, or the loss's
    `weight`. Updates without a trained token and values that are not finite have no part in means
    and maxima; `empty` and `skipped` count such updates.
    """
    names = dict.fromkeys(chain.from_iterable(updates))
    return {
        name: _over_updates(name, [update for update in updates if name in update])
        for name in names
    }


def _over_updates(name: str, updates: Sequence[Mapping[str, float]]) -> float:
    """One value of the metric ``name``, which all ``updates`` have."""
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
    """Result of a step's updates, of which there may be many."""

    updates: Sequence[dict[str, float]]
    """Metrics of each update (`Trainer.step`), in their order."""
    first_pass: int
    """Updates of the first pass over the rows, after which each row was trained on once."""
    tally: Tally
    lr: float
    seconds: float

    def of_first_pass(self) -> dict[str, float]:
        """Metrics of the first pass, together: each row of the step counts once."""
        return over_updates(self.updates[: self.first_pass])

    def values(self) -> dict[str, float]:
        """Scalars that any trainer has."""
        values = _renamed(over_updates(self.updates))
        if len(self.updates) > 1:
            each = [_renamed(update) for update in self.updates]
            for name in _WITH_LARGEST:
                finite = [
                    update[name] for update in each if math.isfinite(update.get(name, math.nan))
                ]
                if finite:
                    values[name + MAX_SUFFIX] = max(finite)
        return values | {
            "loss/lr": self.lr,
            "perf/step_s": self.seconds,
            "perf/trained_tokens": sum(self.tally.row_tokens),
        }


def _renamed(metrics: Mapping[str, float]) -> dict[str, float]:
    """``metrics`` of updates by their tags, without those that have none."""
    tags = {_RENAMED.get(name, name): value for name, value in metrics.items()}
    return {tag: value for tag, value in tags.items() if "/" in tag}


def mfu_report(
    result: StepResult,
    spec: ModelSpec,
    passes: int,
    peak: float | None,
    frozen: Collection[str] = (),
) -> dict[str, float]:
    """The share of ``peak``, operations a second of all ranks together, that a step's ``passes``
    over its rows took.

    Of its whole time: waiting for rows is in it. Towers that are ``frozen`` have a forward pass
    alone. Nothing where the peak is not known.
    """
    if not peak:
        return {}
    flops = training_flops(spec, result.tally.row_tokens, result.tally.media.values(), frozen)
    return {"perf/mfu": passes * flops / (result.seconds * peak)}


def policy_values(result: StepResult) -> dict[str, float]:
    """Scalars of a policy's step. The comparisons of rollout and old log-probs are of the first
    pass, in which each row counts once. `drift` is of the first update, before it: what moved since
    the old log-probs were made is apart from what the step's updates move.

    `parity/*` is how far the two engines that computed the same log-probs are apart, in nats: no
    KL.
    """
    first, rows, tally = result.updates[0], result.of_first_pass(), result.tally
    count = len(tally.rewards)
    mean = sum(tally.rewards) / count
    return result.values() | {
        "reward/mean": mean,
        "reward/std": (sum((reward - mean) ** 2 for reward in tally.rewards) / count) ** 0.5,
        "reward/response_tokens": sum(tally.lengths) / count,
        "reward/stopped_share": (tally.ends["stop"] + tally.ends["env_done"]) / count,
        **({"reward/zero_std_share": tally.equal / tally.compared} if tally.compared else {}),
        **turns_report(tally),
        "parity/logprob_abs_diff": rows.get("train_rollout_logprob_abs_diff", 0.0),
        "parity/logprob_max": rows.get("train_rollout_logprob_max", 0.0),
        "parity/ratio_p99": rows.get("train_rollout_ratio_p99", 1.0),
        "parity/ratio_p999": rows.get("train_rollout_ratio_p999", 1.0),
        "kl/rollout": rows.get("rollout_kl", 0.0),
        "kl/drift": first.get("kl/old", 0.0),
        "loss/clip_fraction_drift": first.get("clip_fraction", 0.0),
        **correction_report(rows),
        **(
            {"r3/routes_equal": float(tally.routes[0] / tally.routes[1])} if tally.routes[1] else {}
        ),
    }


def turns_report(tally: Tally) -> dict[str, float]:
    """Scalars of episodes of several turns; nothing where each is one response."""
    count = len(tally.rewards)
    # A row of an agent program may have one answer, and nothing behind it.
    if not tally.heard and set(tally.ends) <= {"stop", "length"}:
        return {}
    means = {"turns": tally.turns, "rows": len(tally.row_tokens), "heard_tokens": tally.heard}
    ends = {f"ended_{reason}": number for reason, number in tally.ends.items()}
    return {f"episodes/{name}": total / count for name, total in {**means, **ends}.items()}


def correction_report(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics of how far the engine's policy was from the old one, and of what the off-policy
    correction made of it.

    `correction/effective_share`: of as many tokens by the old policy itself, those that would say
    as much.
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
