"""What an algorithm is: its settings, the fields of rows it needs and gives, its advantages and its loss.

An algorithm is one dataclass: the section `algorithm:` of the configuration and the object that roles call are the same
thing, so that a new one is one file. None imports torch before a loss is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from relax_hpc.settings import bounded

if TYPE_CHECKING:
    from torch import Tensor

    from relax_hpc.algorithms.batch import TokenBatch
    from relax_hpc.algorithms.losses import TokenLosses

Row = Mapping[str, Any]
Prompt = Sequence[Sequence[Row]]
"""What came of a prompt: its episodes, each of one row or several."""


@dataclass(kw_only=True, slots=True)
class KlConfig:
    """KL divergence of the policy from the reference, as a term of the loss."""

    coefficient: float = bounded(0.0, 0.0)
    """Weight of the term. 0: there is none, and no reference is run for it."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """How a token's divergence is estimated. The gradient of `k2` is that of KL(policy || reference); that of `k3`, in
    expectation, of KL(reference || policy); that of `k1` is 0 unless it is weighed by `importance`."""
    cap: float = bounded(10.0, 0.0)
    """Largest divergence of a token, in nats: beyond it its gradient is 0. 0: none, and one token may be the step."""
    importance: bool = False
    """Weigh each token's divergence by how much likelier the policy draws it than whoever drew it: value and gradient
    are then those of KL(policy || reference), off-policy too, by k1 and k3; as in DeepSeek-V3.2, arXiv 2512.02556."""
    refresh_every: int = bounded(0, 0)
    """Steps after which the reference takes the policy's weights as they then are. 0: it stays as it is."""


@dataclass(kw_only=True, slots=True)
class CorrectionConfig:
    """Weights of tokens that other weights, or another implementation, sampled than are trained: by old / rollout."""

    kind: Literal["truncate", "mask", "off"] = "truncate"
    """`truncate`: the ratio, up to `high`; `mask`: the ratio within [`low`, `high`], else 0; `off`: 1."""
    level: Literal["token", "sequence"] = "token"
    """The ratio is each token's, or the product over its row."""
    low: float = bounded(0.5, 0.0, 1.0)
    """Smallest ratio that is not masked; `truncate` has no lower edge."""
    high: float = bounded(2.0, 1.0)
    """Largest ratio that is not truncated or masked."""


# Without slots, so that classes which build on others may call super(): with them a dataclass is made anew, and Python
# 3.11 and 3.12 look for super() in the class before.
@dataclass(kw_only=True)
class Algorithm:
    """How rewards become advantages, and advantages a loss.

    These are the settings that all algorithms have. Whoever writes one derives from this class or from an algorithm,
    adds fields of their own, and overrides `advantages` (a number an episode) or `token_advantages` (a number a token),
    and `token_losses` or all of `loss`.
    """

    window: ClassVar[Literal["prompt", "step"]] = "prompt"
    """What the advantages of a row follow from: its prompt group, or all of a step, which they then wait for."""
    gives: ClassVar[tuple[str, ...]] = ("advantages",)
    """Fields of rows that `given` makes."""
    uses_old: ClassVar[bool] = True
    """Whether the loss looks at the log-probabilities by the policy before the step."""

    name: str = ""
    """grpo, dr_grpo, rloo, gspo, cispo, reinforce_pp, dual_clip, or `package.module:Class` of your own."""
    passes: int = bounded(1, 1)
    """Times a training batch is gone through."""
    mini_batches: int = bounded(1, 1)
    """Optimizer steps a pass makes; divides prompts_per_step."""
    reduction: Literal["token_mean", "sequence_mean"] = "token_mean"
    """Over a whole optimizer step: mean over tokens, or over episodes of each episode's mean."""
    entropy_coefficient: float = bounded(0.0)
    """Weight of the entropy's bonus in the loss."""
    balance_coefficient: float = bounded(0.0, 0.0)
    """Weight of the loss that has the tokens of a micro-batch spread over the experts of each layer (arXiv 2101.03961,
    equation 4). Of use for models with experts alone. 0: there is none."""
    log_entropy: bool = False
    """Write the policy's entropy also where it is not in the loss. Neither: it is not computed."""
    kl: KlConfig = field(default_factory=KlConfig)
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    mask_older_tokens: bool = False
    """Leave tokens out of the loss that were drawn by older weights than the last one of their row."""
    shuffle_rewards: bool = False
    """Control experiment: permute rewards over the step's episodes. Nothing should be learned."""

    # -- what it needs -----------------------------------------------------------------------------------------

    @property
    def needs(self) -> tuple[str, ...]:
        """Fields of rows that advantages follow from, beside those that rollout gives with every row."""
        return ("reward",)

    def loss_needs(self, stale: bool = False) -> tuple[str, ...]:
        """Fields of rows that the loss looks at; ``stale``: rows may be of older versions than the one trained.

        Before the only update of a step the policy's own log-probabilities are the old ones, unless rows are older.
        """
        old = ("old_logprobs",) if self.uses_old and (self.updates > 1 or stale) else ()
        return (*self.gives, *old, *(("ref_logprobs",) if self.kl.coefficient else ()))

    @property
    def updates(self) -> int:
        """Optimizer steps of a training step."""
        return self.passes * self.mini_batches

    @property
    def needs_entropy(self) -> bool:
        """Whether anybody has asked for the entropy of the policy."""
        return self.log_entropy or self.entropy_coefficient != 0

    @property
    def whole_step(self) -> bool:
        """Whether advantages wait for all rows of a step."""
        return self.window == "step" or self.shuffle_rewards

    def findings(self) -> Iterator[str]:
        """What is wrong with these settings, one line each, which begins with the setting."""
        if self.kl.coefficient and self.kl.estimator == "k1" and not self.kl.importance:
            yield (
                "kl.estimator: found k1 with a coefficient, allowed: k2, k3, or k1 with kl.importance; "
                "its gradient is 0 in expectation"
            )

    # -- what it does ------------------------------------------------------------------------------------------

    def advantages(self, rewards: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        """Of each episode, [prompts, episodes] float64, of its reward; ``tokens``: how many of it are trained on.

        ``rewards`` are finite float64, at least two of a prompt; of window `step` all of the step's prompts are there.
        """
        raise NotImplementedError(f"{type(self).__name__} says nothing of advantages")

    def token_advantages(self, prompts: Sequence[Prompt]) -> list[np.ndarray]:
        """Of every row, in their order, [tokens] float32: its episode's advantage where the loss mask is set, else 0.

        ValueError: a prompt has less than two episodes, or not as many as the others, or a reward is not finite.
        """
        values = self.advantages(rewards_of(prompts), trained_tokens(prompts))
        found = zip(prompts, values, strict=True)
        of_episodes = (pair for prompt, line in found for pair in zip(prompt, line, strict=True))
        of_rows = [(value, row["loss_mask"]) for episode, value in of_episodes for row in episode]
        return spread_all([value for value, _ in of_rows], [mask for _, mask in of_rows])

    def given(self, prompts: Sequence[Prompt]) -> list[dict[str, np.ndarray]]:
        """Of every row, in their order, the fields of `gives`; whoever gives more than advantages overrides it."""
        return [{"advantages": values} for values in self.token_advantages(prompts)]

    def token_losses(self, batch: TokenBatch) -> TokenLosses:
        """The policy's loss of each token [b, s]; entries whose mask is 0 hold zeros, and do not count."""
        raise NotImplementedError(f"{type(self).__name__} says nothing of its loss")

    def loss(self, batch: TokenBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss *summed* over ``batch``, with gradient, and sums to log: see `relax_hpc.algorithms.losses`."""
        from relax_hpc.algorithms.losses import policy_loss

        return policy_loss(batch, self)


def rewards_of(prompts: Sequence[Prompt]) -> np.ndarray:
    """Rewards [prompts, episodes], float64. ValueError: less than two of a prompt, unequal numbers, or not finite."""
    rewards = np.array([[episode[0]["reward"] for episode in prompt] for prompt in prompts], dtype=np.float64)
    if rewards.ndim != 2 or rewards.shape[1] < 2:
        raise ValueError(f"rewards have shape {rewards.shape}, expected [prompts, episodes >= 2]")
    if not np.isfinite(rewards).all():
        raise ValueError("rewards are not finite")
    return rewards


def trained_tokens(prompts: Sequence[Prompt]) -> np.ndarray:
    """Tokens with a loss mask, [prompts, episodes] int64."""
    return np.array(
        [[sum(np.count_nonzero(row["loss_mask"]) for row in episode) for episode in prompt] for prompt in prompts]
    )


def centred(rewards: np.ndarray) -> np.ndarray:
    """``rewards`` [prompts, n] minus the mean of each prompt; exactly 0 where all of a prompt are equal."""
    # Without the test, rounding of the mean would leave noise that the division by a tiny std blows up.
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
    """``advantage``, one for all or one for each, on the tokens with mask 1, else 0: [tokens] float32."""
    out = np.zeros(len(loss_mask), np.float32)
    out[loss_mask > 0] = advantage
    return out
