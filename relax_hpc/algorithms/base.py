"""Base class of algorithms: settings, the fields of rows that one needs and gives, its advantages
and its loss.

An algorithm is one dataclass: the section `algorithm:` of the configuration and the object that
roles call are the same thing, so that a new one is one file. None imports torch before a loss is
asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses

VARIANCE_EPS = 1e-8
"""Addend to a variance before its root is divided by."""
Reduction = Literal["token_mean", "sequence_mean", "constant"]
"""Kinds of mean that a loss is, see `Algorithm.reduction`."""
Row = Mapping[str, Any]
Prompt = Sequence[Sequence[Row]]
"""Results of a prompt: its episodes, each of one row or several."""


@dataclass(kw_only=True, slots=True)
class KlConfig:
    """KL divergence of the policy from the reference, as a term of the loss."""

    coefficient: float = bounded(0.0, 0.0)
    """Weight of the term. 0: there is none, and no reference is run for it."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's divergence. The gradient of `k2` is that of KL(policy || reference);
    that of `k3`, in expectation, of KL(reference || policy); that of `k1` is 0 unless it is weighed
    by `importance`."""
    cap: float = bounded(10.0, 0.0)
    """Largest divergence of a token, in nats: beyond it its gradient is 0. 0: none, and one token
    may be the step."""
    importance: bool = False
    """Weigh each token's divergence by policy / rollout, whatever `correction` does: by k1 and k3
    value and gradient are then those of KL(policy || reference), off-policy too; as in
    DeepSeek-V3.2, arXiv 2512.02556."""
    refresh_every: int = bounded(0, 0)
    """Steps after which the reference takes the policy's weights as they then are. 0: it stays as
    it is."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Importance weights of off-policy tokens, which older weights or SGLang's arithmetic have
    sampled: pi_old / pi_rollout."""

    kind: Literal["truncate", "mask", "off"] = "truncate"
    """Weight of a token. `truncate`: the ratio, up to `high`; `mask`: the ratio within [`low`,
    `high`], else 0; `off`: 1."""
    level: Literal["token", "sequence"] = "token"
    """Ratio that is meant: each token's, or the product over its row."""
    low: float = bounded(0.5, 0.0, 1.0)
    """Smallest ratio that is not masked; `truncate` has no lower edge."""
    high: float = bounded(2.0, 1.0)
    """Largest ratio that is not truncated or masked."""


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    """Soft punishment of long episodes, taken off their rewards: DAPO, arXiv 2503.14476, equation
    13."""

    max_tokens: int = bounded(0, 0)
    """Sampled tokens that cost an episode the whole penalty, rollout.max_new_tokens as a rule. 0:
    there is none."""
    buffer: int = bounded(0, 0)
    """Tokens before max_tokens over which the penalty grows from 0; at most max_tokens."""
    penalty: float = bounded(1.0, 0.0)
    """Reward that an episode of max_tokens loses; the paper's rewards are -1 and 1."""

    def of(self, tokens: np.ndarray) -> np.ndarray:
        """Rewards that episodes of so many sampled ``tokens`` (any shape) lose, float64;
        `max_tokens` is not 0.

        >>> OverlongConfig(max_tokens=10, buffer=4, penalty=2.0).of(np.array([6, 7, 10,
        ...     11])).tolist()
        [0.0, 0.5, 2.0, 2.0]
        """
        return self.penalty * np.clip(
            (tokens - self.max_tokens) / max(self.buffer, 1) + 1.0, 0.0, 1.0
        )


# Without slots, so that classes which build on others may call super(): with them a dataclass is
# made anew, and Python 3.11 and 3.12 look for super() in the class before.
@dataclass(kw_only=True)
class Algorithm:
    """Algorithm: turns rewards into advantages, and advantages into a loss.

    These are the settings that all algorithms have. Whoever writes one derives from this class or
    from an algorithm, adds fields of their own, and overrides `advantages` (a number an episode) or
    `token_advantages` (a number a token), and `token_losses` or all of `loss`.
    """

    window: ClassVar[Literal["prompt", "step"]] = "prompt"
    """Rows that the advantages of a row follow from: its prompt group's, or all of a step, which
    they then wait for."""
    gives: ClassVar[tuple[str, ...]] = ("advantages",)
    """Fields of rows that `given` makes."""
    uses_old: ClassVar[bool] = True
    """Whether the loss looks at the log-probabilities by the policy before the step."""
    ratio_to_rollout: ClassVar[bool] = False
    """Whether the loss takes the ratio policy / rollout itself, so that no correction weighs it."""
    fewest_samples: ClassVar[int] = 2
    """Episodes that a prompt must have: at least 2 where advantages compare the rewards of a
    prompt's episodes."""
    sequences: ClassVar[int] = 0
    """Sequences in each row of the files that are learned from as they are: 1, or 2 that are
    compared. 0: files have prompts, and engines draw what is learned from."""
    teacher_top_k: ClassVar[int] = 0
    """Tokens, the teacher's likeliest, that rows bring for each of theirs, and whose
    log-probabilities by the policy the loss gets as `TokenBatch.likeliest`; 0: none."""

    name: str = ""
    """Algorithm: grpo, dr_grpo, rloo, gspo, cispo, sapo, m2po, reinforce_pp, reinforce_pp_baseline,
    dual_clip, ppo, distill, or `package.module:Class` of your own; sft and dpo learn from files."""
    passes: int = bounded(1, 1)
    """Times a training batch is gone through."""
    mini_batches: int = bounded(1, 1)
    """Optimizer steps a pass makes; divides prompts_per_step."""
    reduction: Reduction = "token_mean"
    """Mean that the loss is over a whole optimizer step: over tokens; over episodes of each
    episode's mean; or, `constant`, over episodes of each episode's sum divided by
    `constant_tokens`, as Dr. GRPO wants it."""
    constant_tokens: int = bounded(0, 0)
    """Divisor of `constant`, the same for episodes of any length: rollout.max_new_tokens as a
    rule."""
    entropy_coefficient: float = bounded(0.0)
    """Weight of the entropy's bonus in the loss."""
    balance_coefficient: float = bounded(0.0, 0.0)
    """Weight of the loss that has the tokens of a micro-batch spread over the experts of each layer
    (arXiv 2101.03961, equation 4). Of use for models with experts alone. 0: there is none."""
    log_entropy: bool = False
    """Measure the policy's entropy (`loss/entropy_nats`) although it is not in the loss and costs
    something: with kernels `fused` it is free, and measured in any case.
    `loss/sampled_entropy_nats` is an estimate by the drawn tokens that is always there."""
    kl: KlConfig = field(default_factory=KlConfig)
    kl_in_reward: float = bounded(0.0, 0.0)
    """Weight of a KL penalty in the reward, log(rollout / reference) of each token (k1), which
    needs a reference; `kl.coefficient` is the weight of one in the loss."""
    whiten: bool = False
    """Give advantages mean 0 and variance 1 over the trained tokens of the step, on whichever rank
    they are."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    mask_older_tokens: bool = False
    """Leave tokens out of the loss that were drawn by older weights than the last one of their
    row."""
    mask_truncated: bool = False
    """Leave episodes out of the loss any row of which was cut: at its longest, or by a budget of a
    turn or of the episode. Their rewards count for the others."""
    shuffle_rewards: bool = False
    """Control experiment: permute rewards over the step's episodes. Nothing should be learned."""

    # -- what it needs -----------------------------------------------------------------------------

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of rows that advantages follow from, beside those that rollout gives with every
        row."""
        return ("reward", "rollout_logprobs", "ref_logprobs") if self.kl_in_reward else ("reward",)

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        """Fields of rows that the loss looks at. ``stale``: whether older versions than the trained
        one may have drawn the rows; no algorithm of this package needs other fields then.

        The clip is around the policy before the step, however old the rows are (decoupled PPO,
        arXiv 2110.00641). With one update in a step that is the policy itself, and no
        `old_logprobs` are needed.
        """
        old = ("old_logprobs",) if self.uses_old and self.updates > 1 else ()
        return (*self.gives, *old, *(("ref_logprobs",) if self.kl.coefficient else ()))

    @property
    def from_file(self) -> bool:
        """Whether it learns from the rows of files: nothing is drawn."""
        return self.sequences > 0

    @property
    def updates(self) -> int:
        """Optimizer steps of a training step."""
        return self.passes * self.mini_batches

    @property
    def needs_entropy(self) -> bool:
        """Whether anybody has asked for the entropy of the policy."""
        return self.log_entropy or self.entropy_coefficient != 0

    @property
    def has_advantages(self) -> bool:
        """Whether the loss learns from advantages: where all of them are 0, nothing is learned from
        rewards."""
        return "advantages" in self.gives

    @property
    def whole_step(self) -> bool:
        """Whether advantages wait for all rows of a step."""
        return self.window == "step" or self.whiten or self.shuffle_rewards

    def findings(self) -> Iterator[str]:
        """Mistakes in these settings, one line each, which begins with the setting."""
        if self.kl.coefficient and self.kl.estimator == "k1" and not self.kl.importance:
            yield (
                "kl.estimator: found k1 with a coefficient, allowed: k2, k3, or k1 with "
                "kl.importance; its gradient is 0 in expectation"
            )
        if self.kl.coefficient and self.kl_in_reward:
            yield (
                f"kl_in_reward: found {self.kl_in_reward} beside kl.coefficient "
                f"{self.kl.coefficient}, allowed: one of both; they ask for the same twice"
            )
        if self.reduction == "constant" and not self.constant_tokens:
            yield (
                "constant_tokens: found 0 with reduction constant, allowed: more; "
                "rollout.max_new_tokens is usual"
            )
        if self.overlong.buffer > self.overlong.max_tokens:
            yield (
                f"overlong.buffer: found {self.overlong.buffer}, allowed: at most "
                f"overlong.max_tokens, {self.overlong.max_tokens}"
            )

    # -- what it does ------------------------------------------------------------------------------

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Advantages of episodes, [prompts, episodes] float64, from ``rewards``; ``tokens``: how
        many of each are trained on.

        ``rewards`` are finite float64, `fewest_samples` of a prompt or more; of window `step` all
        of the step's prompts are there.
        """
        raise NotImplementedError(f"{type(self).__name__} says nothing of advantages")

    def task_rewards(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Rewards [prompts, episodes], float64, less what `overlong` takes off. ValueError as of
        `rewards_of`."""
        rewards = rewards_of(prompts, self.fewest_samples)
        return (
            rewards - self.overlong.of(sampled_tokens(prompts))
            if self.overlong.max_tokens
            else rewards
        )

    def rewards(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """`task_rewards` less the KL penalties of all tokens that an episode drew."""
        rewards = self.task_rewards(prompts)
        if not self.kl_in_reward:
            return rewards
        drawn = [
            [sum(float(divergence(row).sum()) for row in episode) for episode in prompt]
            for prompt in prompts
        ]
        return rewards - self.kl_in_reward * np.array(drawn)

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Advantages of the tokens of every row, in their order, [tokens] float32: its episode's
        advantage where the loss mask is set, else 0.

        ValueError: a prompt has fewer than `fewest_samples` episodes, or not as many as the others,
        or a reward is not finite.
        """
        values = self.advantages(self.rewards(prompts), trained_tokens(prompts))
        found = zip(prompts, values, strict=True)
        of_episodes = (pair for prompt, line in found for pair in zip(prompt, line, strict=True))
        of_rows = [(value, row["loss_mask"]) for episode, value in of_episodes for row in episode]
        return spread_all([value for value, _ in of_rows], [mask for _, mask in of_rows])

    def given(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        """Fields of `gives` for every row, in their order; whoever gives more than advantages
        overrides it."""
        return [
            {"advantages": values}
            for values in self.whitened(self.token_advantages(prompts), prompts)
        ]

    def whitened(self, advantages: list[np.ndarray], prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """``advantages`` of the rows of ``prompts``, normalised over all their trained tokens if
        `whiten` says so."""
        masks = [row["loss_mask"] for prompt in prompts for episode in prompt for row in episode]
        return whitened(advantages, masks) if self.whiten else advantages

    def trains_policy(self, step: int) -> bool:
        """Whether step ``step`` changes the policy: in some algorithms others learn first."""
        return True

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        """The policy's loss of each token [b, s]; entries whose mask is 0 hold zeros, and do not
        count."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of its loss")

    def value_loss(
        self, predicted: Tensor, known: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The critic's loss of ``predicted`` values [b, s], *summed*, and sums to log, in
        algorithms that have one; `values` and `returns` are among the fields that are ``known``."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of a critic's loss")

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss *summed* over ``batch``, with gradient, and sums to log: see
        `relax_hpc.algorithms.losses`."""
        from relax_hpc.algorithms.losses import policy_loss

        return policy_loss(batch, self)


def rewards_of(prompts: Sequence[Prompt], fewest: int = 2) -> np.ndarray:
    """Rewards [prompts, episodes], float64. ValueError: fewer than ``fewest`` of a prompt, unequal
    numbers, or not finite."""
    rewards = np.array(
        [[episode[0]["reward"] for episode in prompt] for prompt in prompts], dtype=np.float64
    )
    if rewards.ndim != 2 or rewards.shape[1] < fewest:
        raise ValueError(
            f"rewards have shape {rewards.shape}, expected [prompts, episodes >= {fewest}]"
        )
    if not np.isfinite(rewards).all():
        raise ValueError("rewards are not finite")
    return rewards


def trained_tokens(prompts: Sequence[Prompt]) -> np.ndarray:
    """Tokens with a loss mask, [prompts, episodes] int64."""
    return np.array(
        [
            [sum(np.count_nonzero(row["loss_mask"]) for row in episode) for episode in prompt]
            for prompt in prompts
        ]
    )


def sampled_tokens(prompts: Sequence[Prompt]) -> np.ndarray:
    """Tokens that the policy drew, trained on or not, [prompts, episodes] int64."""
    return np.array(
        [
            [sum(np.count_nonzero(drawn_tokens(row)) for row in episode) for episode in prompt]
            for prompt in prompts
        ]
    )


def drawn_tokens(row: Row) -> np.ndarray:
    """Whether the policy drew each token of ``row``, trained on or not: bool [tokens]."""
    return row["token_versions"] != 0


def divergence(row: Row) -> np.ndarray:
    """log(rollout / reference) of each token of ``row`` that the policy drew, 0 of others: float64
    [tokens].

    It estimates KL(policy || reference) by k1. A token that is masked counts too: the reward of its
    episode stands in the baseline of others, and would be too high if only trained tokens paid.
    """
    return np.where(
        drawn_tokens(row), row["rollout_logprobs"].astype(np.float64) - row["ref_logprobs"], 0.0
    )


def divergence_to_come(episode: Sequence[Row]) -> np.ndarray:
    """Sum of `divergence` over each trained token of an episode and all tokens after it, in the
    order of its rows: float64 [trained tokens]."""
    every = np.concatenate([divergence(row) for row in episode])
    trained = np.concatenate([row["loss_mask"] for row in episode]) > 0
    return every[::-1].cumsum()[::-1][trained]


def normalised(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """``values`` [n] less their mean over their spread, each of them there ``counts`` times (1); 0
    if all are equal."""
    counts = np.ones_like(values) if counts is None else counts
    seen, total = values[counts > 0], counts.sum()
    if total < 2 or (seen == seen[0]).all():
        return np.zeros_like(values)
    mean = (counts * values).sum() / total
    var = (counts * (values - mean) ** 2).sum() / (total - 1)
    return (values - mean) / np.sqrt(var + VARIANCE_EPS)


def whitened(
    advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """``advantages`` of rows, [tokens] each, with mean 0 and variance 1 over all tokens with mask
    1; 0 elsewhere."""
    flat, mask = np.concatenate(advantages).astype(np.float64), np.concatenate(loss_masks) > 0
    flat[mask] = normalised(flat[mask])
    return np.split(
        (flat * mask).astype(np.float32), np.cumsum([len(row) for row in advantages])[:-1]
    )


def centred(rewards: np.ndarray) -> np.ndarray:
    """``rewards`` [prompts, n] minus the mean of each prompt; exactly 0 where all of a prompt are
    equal."""
    # Without the test, rounding of the mean would leave noise that the division by a tiny std blows
    # up.
    equal = (rewards == rewards[:, :1]).all(axis=1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def spread_all(advantages: Sequence[float], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """`spread` of one advantage each, for many short rows at the price of one."""
    lengths = [len(mask) for mask in loss_masks]
    flat = np.repeat(np.array(advantages, np.float32), lengths)
    flat[np.concatenate(loss_masks) == 0] = 0.0
    ends = list(accumulate(lengths))
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def spread(advantage: float | np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """``advantage``, one for all or one for each, on the tokens with mask 1, else 0: [tokens]
    float32."""
    out = np.zeros(len(loss_mask), np.float32)
    out[loss_mask > 0] = advantage
    return out
