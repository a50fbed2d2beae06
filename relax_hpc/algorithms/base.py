"""Base class of algorithms: settings, required and produced fields of rows, advantages and loss.

An algorithm is one dataclass. The section `algorithm:` of the configuration is the object that
roles call, so a new algorithm is one file. No algorithm imports torch before its loss is computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from relax_hpc.base.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses

VARIANCE_EPS = 1e-8
"""Added to a variance before the division by its square root."""
Reduction = Literal["token_mean", "sequence_mean", "constant"]
"""Kind of mean that the loss is, see `Algorithm.reduction`."""
Row = Mapping[str, Any]
Prompt = Sequence[Sequence[Row]]
"""Rows of one prompt: its episodes, each with one row or several."""


@dataclass(kw_only=True, slots=True)
class KlConfig:
    """KL divergence of the policy from the reference, as a term of the loss."""

    coefficient: float = bounded(0.0, 0.0)
    """Weight of the term in the loss. With 0 the loss has no such term, and no reference runs for
    it."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of a token's divergence. The gradient of `k2` is the gradient of KL(policy ||
    reference). The expected gradient of `k3` is the gradient of KL(reference || policy). The
    expected gradient of `k1` is 0 unless `importance` weights it."""
    cap: float = bounded(10.0, 0.0)
    """Largest divergence of a token, in nats. Beyond it the gradient of the token's term is 0. With
    0 there is no limit, and one token can dominate a step."""
    importance: bool = False
    """Multiply each token's divergence by policy / rollout, whatever `correction` does. Value and
    gradient of k1 and k3 are then those of KL(policy || reference), also for off-policy tokens, as
    in DeepSeek-V3.2, arXiv 2512.02556."""
    refresh_every: int = bounded(0, 0)
    """Number of steps after which the reference takes the current weights of the policy. With 0 the
    reference does not change."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Importance weights pi_old / pi_rollout of off-policy tokens: tokens that older weights, or
    the different arithmetic of the rollout engine, have sampled."""

    kind: Literal["truncate", "mask", "off"] = "truncate"
    """Weight of a token. `truncate`: the ratio, at most `high`. `mask`: the ratio if it is within
    [`low`, `high`], otherwise 0. `off`: 1."""
    level: Literal["token", "sequence"] = "token"
    """Kind of ratio: the ratio of each token, or the product of the ratios of its row."""
    low: float = bounded(0.5, 0.0, 1.0)
    """Smallest ratio that `mask` keeps. `truncate` has no lower bound."""
    high: float = bounded(2.0, 1.0)
    """Largest ratio that is not truncated or masked."""


@dataclass(kw_only=True, slots=True)
class OverlongConfig:
    """Soft penalty for long episodes, subtracted from their rewards: DAPO, arXiv 2503.14476,
    equation 13."""

    max_tokens: int = bounded(0, 0)
    """Number of sampled tokens at which an episode gets the whole penalty, usually
    rollout.max_new_tokens. With 0 there is no penalty."""
    buffer: int = bounded(0, 0)
    """Number of tokens before max_tokens over which the penalty grows from 0; at most
    max_tokens."""
    penalty: float = bounded(1.0, 0.0)
    """Reward that an episode of max_tokens loses. In the paper rewards are -1 and 1."""

    def penalties(self, tokens: np.ndarray) -> np.ndarray:
        """Return the rewards that episodes with ``tokens`` sampled tokens (any shape) lose,
        float64.

        `max_tokens` must not be 0.

        >>> overlong = OverlongConfig(max_tokens=10, buffer=4, penalty=2.0)
        >>> overlong.penalties(np.array([6, 7, 10, 11])).tolist()
        [0.0, 0.5, 2.0, 2.0]
        """
        return self.penalty * np.clip(
            (tokens - self.max_tokens) / max(self.buffer, 1) + 1.0, 0.0, 1.0
        )

    of = penalties  # Name in release 0.1.


# No slots: with slots a dataclass is created a second time, and super() without arguments, in
# Python 3.11 and 3.12, refers to the first class. Derived classes call super().
@dataclass(kw_only=True)
class Algorithm:
    """Algorithm: turns rewards into advantages, and advantages into a loss.

    These are the settings that all algorithms have. To write an algorithm, derive from this class
    or from an existing algorithm and add fields for its settings. Override `advantages` (one number
    per episode) or `token_advantages` (one number per token), and `token_losses` or the whole
    `loss`.
    """

    window: ClassVar[Literal["prompt", "step"]] = "prompt"
    """Rows that the advantages of a row depend on: the rows of its prompt group, or all rows of the
    step. With `step`, advantages are computed when all rows of the step exist."""
    gives: ClassVar[tuple[str, ...]] = ("advantages",)
    """Names of the fields of rows that `given` computes. The role `advantages` adds these fields to
    the rows in the queue, and the trainers wait for them."""
    uses_old: ClassVar[bool] = True
    """Whether the loss uses the log-probabilities by the policy before the step."""
    ratio_to_rollout: ClassVar[bool] = False
    """Whether the loss uses the ratio policy / rollout itself, so that no correction applies."""
    fewest_samples: ClassVar[int] = 2
    """Smallest number of episodes of a prompt: at least 2 if advantages compare the rewards of a
    prompt's episodes."""
    sequences: ClassVar[int] = 0
    """Number of sequences in each row of the files that the algorithm learns from: 1, or 2 that are
    compared. With 0 files contain prompts, and engines generate the training sequences."""
    teacher_top_k: ClassVar[int] = 0
    """Number of the teacher's most likely tokens that rows contain for each of their tokens. The
    loss gets the policy's log-probabilities of these tokens as `TokenBatch.likeliest`. 0: none."""

    name: str = ""
    """Name of the algorithm: grpo, dr_grpo, rloo, gspo, cispo, sapo, m2po, reinforce_pp,
    reinforce_pp_baseline, dual_clip, ppo or distill; sft or dpo, which learn from files; or
    `package.module:Class` for your own class."""
    passes: int = bounded(1, 1)
    """Number of passes over the training batch of a step."""
    mini_batches: int = bounded(1, 1)
    """Number of optimizer steps in each pass. It divides prompts_per_step."""
    reduction: Reduction = "token_mean"
    """Average of the loss over an optimizer step. `token_mean`: over tokens. `sequence_mean`:
    over episodes, of the mean of each episode. `constant`: over episodes, of the sum of each
    episode divided by `constant_tokens`, as in Dr. GRPO."""
    constant_tokens: int = bounded(0, 0)
    """Divisor that `reduction: constant` applies to episodes of any length, usually
    rollout.max_new_tokens."""
    entropy_coefficient: float = bounded(0.0)
    """Weight of the entropy bonus in the loss."""
    balance_coefficient: float = bounded(0.0, 0.0)
    """Weight of the load-balancing loss, which spreads the tokens of a micro-batch over the experts
    of each layer (arXiv 2101.03961, equation 4). It is useful only for models with experts. With 0
    the loss has no such term."""
    log_entropy: bool = False
    """Measure the policy's entropy (`loss/entropy_nats`) even if it is not in the loss. This costs
    time, except with `actor.kernels: fused`, which always measures it.
    `loss/sampled_entropy_nats`, an estimate from the sampled tokens, is always measured."""
    kl: KlConfig = field(default_factory=KlConfig)
    kl_in_reward: float = bounded(0.0, 0.0)
    """Weight of a KL penalty in the reward: log(rollout / reference) of each token (k1). It needs a
    reference. `kl.coefficient` is the weight of a KL term in the loss."""
    whiten: bool = False
    """Normalize advantages to mean 0 and variance 1 over all trained tokens of the step, on all
    ranks."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    mask_older_tokens: bool = False
    """Exclude tokens from the loss that older weights sampled than the last token of their row."""
    mask_truncated: bool = False
    """Exclude an episode from the loss if one of its rows was cut: at the maximum length, or by a
    budget of a turn or of the episode. Its reward still counts in the baseline of the other
    episodes."""
    shuffle_rewards: bool = False
    """Permute the rewards of the step's episodes. This is a control experiment: nothing should be
    learned."""

    # -- required data -----------------------------------------------------------------------------

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of rows that advantages are computed from, in addition to the fields that rollout
        adds to every row."""
        return ("reward", "rollout_logprobs", "ref_logprobs") if self.kl_in_reward else ("reward",)

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        """Fields of rows that the loss uses.

        ``stale``: whether older versions than the trained version may have sampled the rows. No
        algorithm of this package then needs other fields.

        The clip is around the policy before the step, however old the rows are (decoupled PPO,
        arXiv 2110.00641). If a step has one update, that policy is the trained policy, and
        `old_logprobs` are not needed.
        """
        old = ("old_logprobs",) if self.uses_old and self.updates > 1 else ()
        reference = ("ref_logprobs",) if self.kl.coefficient else ()
        return (*self.gives, *old, *reference)

    @property
    def from_file(self) -> bool:
        """Whether the algorithm learns from rows of files, so that no engine generates rows."""
        return self.sequences > 0

    @property
    def updates(self) -> int:
        """Optimizer steps of a training step."""
        return self.passes * self.mini_batches

    @property
    def needs_entropy(self) -> bool:
        """Whether the settings require the entropy of the policy."""
        return self.log_entropy or self.entropy_coefficient != 0

    @property
    def has_advantages(self) -> bool:
        """Whether the loss uses advantages. If they are all 0, nothing is learned from rewards."""
        return "advantages" in self.gives

    @property
    def whole_step(self) -> bool:
        """Whether advantages can be computed only when all rows of a step exist."""
        return self.window == "step" or self.whiten or self.shuffle_rewards

    def findings(self) -> Iterator[str]:
        """Mistakes in these settings, one line each. Each line begins with the name of a
        setting."""
        if self.kl.coefficient and self.kl.estimator == "k1" and not self.kl.importance:
            yield (
                "kl.estimator: found k1 with a coefficient, allowed: k2, k3, or k1 with "
                "kl.importance; the expected gradient of k1 alone is 0"
            )
        if self.kl.coefficient and self.kl_in_reward:
            yield (
                f"kl_in_reward: found {self.kl_in_reward} together with kl.coefficient "
                f"{self.kl.coefficient}, allowed: only one of the two; both penalize the same "
                "divergence"
            )
        if self.reduction == "constant" and not self.constant_tokens:
            yield (
                "constant_tokens: found 0 with reduction constant, allowed: above 0; "
                "rollout.max_new_tokens is usual"
            )
        if self.overlong.buffer > self.overlong.max_tokens:
            yield (
                f"overlong.buffer: found {self.overlong.buffer}, allowed: at most "
                f"overlong.max_tokens, {self.overlong.max_tokens}"
            )

    # -- computations ------------------------------------------------------------------------------

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Return the advantages of episodes, [prompts, episodes] float64.

        ``rewards`` [prompts, episodes] are finite float64, with at least `fewest_samples` episodes
        of each prompt. ``tokens`` is the number of trained tokens of each episode. If `window` is
        `step`, all prompts of the step are included.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define advantages")

    def task_rewards(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Return rewards [prompts, episodes], float64, minus the penalties of `overlong`.

        ValueError: as `rewards_of`.
        """
        rewards = rewards_of(prompts, self.fewest_samples)
        if not self.overlong.max_tokens:
            return rewards
        return rewards - self.overlong.penalties(sampled_tokens(prompts))

    def rewards(self, prompts: Sequence[Prompt]) -> np.ndarray:
        """Return `task_rewards` minus the KL penalties of all tokens that were sampled for an
        episode."""
        rewards = self.task_rewards(prompts)
        if not self.kl_in_reward:
            return rewards
        totals = [[_total_divergence(episode) for episode in prompt] for prompt in prompts]
        return rewards - self.kl_in_reward * np.array(totals)

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return the advantages of the tokens of every row, in the order of rows: [tokens] float32.
        A token has the advantage of its episode where the loss mask is set, otherwise 0.

        ValueError: a prompt has fewer than `fewest_samples` episodes, prompts have different
        numbers of episodes, or a reward is not finite.
        """
        values = self.advantages(self.rewards(prompts), trained_tokens(prompts))
        row_values = []
        masks = []
        for prompt, prompt_values in zip(prompts, values, strict=True):
            for episode, value in zip(prompt, prompt_values, strict=True):
                row_values += [value] * len(episode)
                masks += [row["loss_mask"] for row in episode]
        return spread_all(row_values, masks)

    def given(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        """Compute the fields that `gives` names: {field: values} for every row, in the order of
        rows. The role `advantages` calls it. Override it if the algorithm computes other fields
        than advantages, as `Ppo` does with `returns`."""
        advantages = self.whitened(self.token_advantages(prompts), prompts)
        return [{"advantages": values} for values in advantages]

    def whitened(self, advantages: list[np.ndarray], prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Return ``advantages`` of the rows of ``prompts``. If `whiten` is set, they are normalized
        over all trained tokens."""
        if not self.whiten:
            return advantages
        return whitened(advantages, [row["loss_mask"] for row in rows_of(prompts)])

    def trains_policy(self, step: int) -> bool:
        """Whether step ``step`` changes the policy. Some algorithms first train only a critic."""
        return True

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        """Return the policy's loss of each token [b, s]. Values where the mask is 0 are zeros and
        do not count."""
        raise NotImplementedError(f"{type(self).__name__} does not define a loss")

    def value_loss(
        self, predicted: Tensor, fields: Mapping[str, Tensor], mask: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the critic's loss of ``predicted`` values [b, s], *summed*, and sums to log.

        Only algorithms with a critic define it. ``fields`` contains `values` and `returns`.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define a loss of a critic")

    def held_out(self, rows: Sequence[Row], logprobs: Sequence[np.ndarray]) -> dict[str, float]:
        """Return metrics of held-out rows from the policy's ``logprobs`` of their tokens, [tokens]
        each, in nats. Only algorithms that learn from files define it."""
        raise NotImplementedError(f"{type(self).__name__} does not define metrics of held-out rows")

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss *summed* over ``batch``, with gradient, and sums to log; see
        `relax_hpc.algorithms.losses`."""
        from relax_hpc.algorithms.losses import policy_loss

        return policy_loss(batch, self)


def rows_of(prompts: Sequence[Prompt]) -> list[Row]:
    """Return the rows of all episodes of ``prompts``, in order."""
    episodes = chain.from_iterable(prompts)
    return list(chain.from_iterable(episodes))


def rewards_of(prompts: Sequence[Prompt], fewest: int = 2) -> np.ndarray:
    """Return rewards [prompts, episodes], float64.

    ValueError: a prompt has fewer than ``fewest`` episodes, prompts have different numbers of
    episodes, or a reward is not finite.
    """
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
    """Return the number of tokens with a loss mask, [prompts, episodes] int64."""

    def count(episode: Sequence[Row]) -> int:
        return sum(int(np.count_nonzero(row["loss_mask"])) for row in episode)

    return np.array([[count(episode) for episode in prompt] for prompt in prompts])


def sampled_tokens(prompts: Sequence[Prompt]) -> np.ndarray:
    """Return the number of tokens that the policy sampled, trained or not, [prompts, episodes]
    int64."""

    def count(episode: Sequence[Row]) -> int:
        return sum(int(np.count_nonzero(drawn_tokens(row))) for row in episode)

    return np.array([[count(episode) for episode in prompt] for prompt in prompts])


def drawn_tokens(row: Row) -> np.ndarray:
    """Return whether the policy sampled each token of ``row``, trained or not: bool [tokens]."""
    return row["token_versions"] != 0


def divergence(row: Row) -> np.ndarray:
    """Return log(rollout / reference) of each token of ``row`` that the policy sampled, and 0 of
    other tokens: float64 [tokens].

    It is the estimate k1 of KL(policy || reference). A token that is masked counts too: the reward
    of its episode is part of the baseline of other episodes, and would be too high if only trained
    tokens had a penalty.
    """
    log_ratio = row["rollout_logprobs"].astype(np.float64) - row["ref_logprobs"]
    return np.where(drawn_tokens(row), log_ratio, 0.0)


def _total_divergence(episode: Sequence[Row]) -> float:
    return sum(float(divergence(row).sum()) for row in episode)


def divergence_to_come(episode: Sequence[Row]) -> np.ndarray:
    """Return, for each trained token of an episode, the sum of `divergence` over this token and all
    later tokens in the order of the episode's rows: float64 [trained tokens]."""
    divergences = np.concatenate([divergence(row) for row in episode])
    trained = np.concatenate([row["loss_mask"] for row in episode]) > 0
    return divergences[::-1].cumsum()[::-1][trained]


def normalised(values: np.ndarray, counts: np.ndarray | None = None) -> np.ndarray:
    """Return ``values`` [n] minus their mean, divided by their standard deviation. Each value
    counts ``counts`` times (once by default). All results are 0 if all values are equal."""
    counts = np.ones_like(values) if counts is None else counts
    counted = values[counts > 0]
    total = counts.sum()
    if total < 2 or (counted == counted[0]).all():
        return np.zeros_like(values)
    mean = (counts * values).sum() / total
    var = (counts * (values - mean) ** 2).sum() / (total - 1)
    return (values - mean) / np.sqrt(var + VARIANCE_EPS)


def whitened(
    advantages: Sequence[np.ndarray], loss_masks: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return ``advantages`` of rows, [tokens] each, normalized to mean 0 and variance 1 over all
    tokens with mask 1. Other tokens have 0."""
    flat = np.concatenate(advantages).astype(np.float64)
    mask = np.concatenate(loss_masks) > 0
    flat[mask] = normalised(flat[mask])
    row_ends = np.cumsum([len(row) for row in advantages])[:-1]
    return np.split((flat * mask).astype(np.float32), row_ends)


def centred(rewards: np.ndarray) -> np.ndarray:
    """Return ``rewards`` [prompts, n] minus the mean of each prompt; exactly 0 if all rewards of a
    prompt are equal."""
    # Without this test the rounding of the mean would leave noise, which a division by a tiny
    # standard deviation amplifies.
    equal = (rewards == rewards[:, :1]).all(axis=1, keepdims=True)
    return np.where(equal, 0.0, rewards - rewards.mean(axis=1, keepdims=True))


def spread_all(advantages: Sequence[float], loss_masks: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return `spread` of one advantage per row. It is faster than `spread` for many short rows."""
    lengths = [len(mask) for mask in loss_masks]
    flat = np.repeat(np.array(advantages, np.float32), lengths)
    flat[np.concatenate(loss_masks) == 0] = 0.0
    ends = list(accumulate(lengths))
    return [flat[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def spread(advantage: float | np.ndarray, loss_mask: np.ndarray) -> np.ndarray:
    """Return ``advantage``, one number or one per token, on the tokens with mask 1, and 0 on
    others: [tokens] float32."""
    out = np.zeros(len(loss_mask), np.float32)
    out[loss_mask > 0] = advantage
    return out
