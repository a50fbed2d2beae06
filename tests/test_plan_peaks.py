"""`relax-hpc plan` beside what megatron-core's model and optimizer really take, counted on a CPU byte by byte."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from relax_hpc.algorithms import Grpo
from relax_hpc.config.load import build
from relax_hpc.config.schema import ActorConfig, Config, ModelConfig
from relax_hpc.models.families import spec_of
from relax_hpc.models.hf_files import read_config
from relax_hpc.plan import roles
from relax_hpc.training import logprobs
from relax_hpc.training.trainer import Trainer
from tests.convert_helpers import MIXED, model
from tests.requirements import requires
from tests.training_helpers import Peak, batch, one_rank_fixture, rows  # noqa: F401

requires("torch", "megatron")
pytestmark = pytest.mark.usefixtures("one_rank")
from relax_hpc.models.layer_spec import RMSNorm  # noqa: E402
from relax_hpc.training.model import PolicyModel  # noqa: E402

TOKENS, ROW = 512, 128
SHAPE = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 3, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4000}
DENSE = {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True, **SHAPE}
CASES: dict[str, tuple[dict[str, Any], str, dict[str, Any], Grpo]] = {
    "kept": (DENSE, "bfloat16", {"recompute": "none"}, Grpo()),
    "selective": (DENSE, "bfloat16", {"recompute": "selective"}, Grpo()),
    "float32": (DENSE, "float32", {"recompute": "full"}, Grpo()),
    "logits and entropy": (
        DENSE | {"vocab_size": 20_000},
        "bfloat16",
        {"recompute": "full"},
        Grpo(entropy_coefficient=0.1),
    ),
    "wide heads, untied": (
        DENSE | {"head_dim": 128, "tie_word_embeddings": False},
        "bfloat16",
        {"optimizer": {"distributed": True}},
        Grpo(),
    ),
    "experts": (MIXED | SHAPE | {"moe_intermediate_size": 128}, "bfloat16", {"recompute": "full"}, Grpo()),
}


class KernelNorm(torch.autograd.Function):
    """Keeps what torch's kernel for GPUs keeps: its input. What it has on a CPU keeps two float32 copies of it."""

    @staticmethod
    def forward(ctx, x, weight, eps):
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def backward(ctx, slope):
        x, weight = ctx.saved_tensors
        d_x, d_weight = torch.empty_like(x), torch.zeros_like(weight)
        for part in (slice(at, at + 64) for at in range(0, len(x), 64)):
            with torch.enable_grad():
                leaves = x[part].detach().requires_grad_(), weight.detach().requires_grad_()
                d_x[part], more = torch.autograd.grad(
                    F.rms_norm(leaves[0], weight.shape, leaves[1], ctx.eps), leaves, slope[part]
                )
            d_weight += more
        return d_x, d_weight, None


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Without a float32 copy of the whole, as on a GPU."""
    for part in (slice(at, at + 64) for at in range(0, len(left), 64)):
        total[part] += (left[part] @ right).to(total.dtype)


def held(trainer: Trainer) -> dict[str, int]:
    """Bytes of what is there between steps, each piece of memory once."""
    parameters, states = list(trainer.model.module.parameters()), list[Tensor]()
    for part in trainer.optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            states += group["params"]
            states += [value for one in group["params"] for value in part.optimizer.state[one].values()]
    seen: set[int] = set()

    def fresh(tensors: list[Tensor]) -> int:
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors}
        new = {where: size for where, size in storages.items() if where not in seen}
        seen.update(new)
        return sum(new.values())

    kinds = {"weights": parameters, "gradients": [one.main_grad for one in parameters], "optimizer states": states}
    return {name: fresh(tensors) for name, tensors in kinds.items()}


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_was_worked_out(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that stay to 1 %, all of them at the worst moment to 10 %."""
    hf, dtype, actor, algorithm = CASES[case]
    monkeypatch.setattr(RMSNorm, "forward", lambda self, x: KernelNorm.apply(x, self.weight, self.eps))
    monkeypatch.setattr(logprobs, "_add_product", add_product)
    settings = build(ActorConfig, actor | {"max_tokens_per_micro_batch": TOKENS})
    config = Config(actor=settings, algorithm=algorithm, model=ModelConfig(dtype=dtype))
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 1, ROW - 1
    directory = model(tmp_path / "hf", hf)
    policy = PolicyModel(read_config(directory), config.model, settings.parallel, settings)
    policy.load_hf(directory)
    trainer = Trainer.of(policy, algorithm, settings, 1.0)
    [row] = rows(1)
    long = {
        name: value.repeat(ROW)[-ROW:] if name == "loss_mask" else value.repeat(ROW)[:ROW]
        for name, value in row.items()
    }
    long["loss_mask"] = long["loss_mask"] * 0 + 1
    given = [batch([long] * (TOKENS // ROW))]
    with Peak() as passes:
        trainer.accumulate(given)
    with Peak() as update:
        trainer.step(1e-6)
    expected = roles.actor(config, spec_of(read_config(directory)), "actor", 1)
    found = held(trainer)
    for name, size in found.items():
        assert size == pytest.approx(expected.resident[name], rel=0.01), name
    total = sum(found.values()) + max(passes.bytes, update.bytes)
    assert expected.peak - roles.CONTEXT_BYTES == pytest.approx(total, rel=0.1)
