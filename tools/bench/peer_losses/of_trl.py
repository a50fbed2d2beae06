"""TRL: the losses of its GRPOTrainer, whose method is called with a stand-in for all of a trainer
but its settings."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from cases import TOKENS, Answer, Case, Comparison, our_loss, with_gradient
from torch import Tensor

from relax_hpc.algorithms import Algorithm, Cispo, DualClip, Grpo, Gspo, Sapo
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig

MODULE = "trl.trainer.grpo_trainer"
OFF = CorrectionConfig(kind="off")
PARTS = {"correction": OFF, "clip_low": 0.2, "clip_high": 0.28}
KL = KlConfig(coefficient=0.1, cap=0.0)
UNBIASED = KlConfig(coefficient=0.1, cap=0.0, importance=True)


def comparisons() -> Iterator[Comparison]:
    """Of all losses that both have. Its advantages are lines of a longer method, and no function to
    call."""
    pairs: list[tuple[str, Algorithm, dict[str, Any]]] = [
        ("mean over tokens", Grpo(**PARTS), {"loss_type": "dapo"}),
        ("mean over responses", Grpo(**PARTS, reduction="sequence_mean"), {"loss_type": "grpo"}),
        (
            "constant normaliser",
            Grpo(**PARTS, reduction="constant", constant_tokens=TOKENS),
            {"loss_type": "dr_grpo"},
        ),
        ("with KL k3", Grpo(**PARTS, kl=KL), {"loss_type": "dapo", "beta": 0.1}),
        (
            "with KL k3, weighed",
            Grpo(**PARTS, kl=UNBIASED),
            {"loss_type": "dapo", "beta": 0.1, "unbiased_kl": True},
        ),
        ("loss", DualClip(**PARTS, clip_cap=3.0), {"loss_type": "dapo", "delta": 3.0}),
        ("loss", Cispo(correction=OFF, clip_high=4.0), {"loss_type": "cispo", "epsilon_high": 5.0}),
        ("loss", Gspo(**PARTS), {"loss_type": "grpo", "level": "sequence"}),
    ]
    for what, algorithm, settings in pairs:
        # Without its correction for vLLM, TRL weighs a KL by policy / old.
        yield Comparison(
            algorithm.name, what, our_loss(algorithm, drawn_by_old=True), their_loss(**settings)
        )
    sapo = our_loss(Sapo(correction=OFF))
    yield Comparison(
        "sapo", "loss", sapo, their_loss("sapo"), 1e-6, "their temperatures are float32"
    )


@dataclass(slots=True)
class Alone:
    """An accelerator of one process."""

    num_processes: int = 1
    sync_gradients: bool = True

    def gather(self, values: Tensor) -> Tensor:
        return values

    def reduce(self, values: Tensor, reduction: str = "sum") -> Tensor:
        return values


def their_loss(
    loss_type: str,
    beta: float = 0.0,
    delta: float | None = None,
    epsilon_high: float = 0.28,
    level: str = "token",
    unbiased_kl: bool = False,
) -> Answer:
    """The loss of a type and its gradient, as `cases.our_loss`."""
    from trl import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    defaults = {name: field.default for name, field in GRPOConfig.__dataclass_fields__.items()}
    args = SimpleNamespace(
        **defaults
        | {"delta": delta, "use_bias_correction_kl": unbiased_kl, "steps_per_generation": 1}
    )
    trainer = SimpleNamespace(
        args=args,
        accelerator=Alone(),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        beta=beta,
        epsilon_low=0.2,
        epsilon_high=epsilon_high,
        importance_sampling_level=level,
        max_completion_length=TOKENS,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        aux_loss_enabled=False,
        entropy_coef=0.0,
        use_adaptive_entropy=False,
        _entropy_bonus_enabled=False,
        _metrics=defaultdict(lambda: defaultdict(list)),
    )

    def answer(case: Case) -> Tensor:
        ids = torch.zeros_like(case.mask, dtype=torch.long)
        inputs = {
            "prompt_ids": ids[:, :1],
            "prompt_mask": torch.ones_like(ids[:, :1]),
            "completion_ids": ids,
            "completion_mask": case.mask,
            "advantages": case.advantages[:, 0],
            "old_per_token_logps": case.old,
            "ref_per_token_logps": case.ref,
            "num_items_in_batch": case.mask.sum(),
        }

        def loss(logprobs: Tensor) -> Tensor:
            trainer._get_per_token_logps_and_entropies = lambda *_, **__: (
                logprobs,
                torch.zeros_like(logprobs),
                None,
            )
            return GRPOTrainer._compute_loss(trainer, trainer.model, inputs)

        return with_gradient(loss, case.logprobs)

    return answer
