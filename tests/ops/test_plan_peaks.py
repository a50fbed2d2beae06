"""`relax-hpc plan` beside what megatron-core's model and optimizer really take, counted on a CPU
byte by byte.

Of several ranks one is there, and its collectives are of torch's backend `fake`: they take what
others would take.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F

from relax_hpc.algorithms import Grpo
from relax_hpc.config.load import build
from relax_hpc.config.schema import ActorConfig, Config, ModelConfig, ParallelConfig
from relax_hpc.ops.plan import optimizer_memory, roles
from relax_hpc.ops.plan.footprint import Footprint
from relax_hpc.training import adam, logprobs, parallel, parity
from relax_hpc.training.checkpoint.store import sharded_state
from relax_hpc.training.device_offload import DeviceOffload
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.trainer import Trainer
from tests.helpers.convert_helpers import MIXED, model
from tests.helpers.training_helpers import Peak, batch, rows
from tests.requirements import requires

requires("torch", "megatron")
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator  # noqa: E402

from relax_hpc.training.model import PolicyModel  # noqa: E402
from relax_hpc.training.models.norm import RMSNorm  # noqa: E402

TOKENS, ROW = 512, 128
SHAPE = {
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4000}
DENSE = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
    **SHAPE,
}
MANY = {"moe_intermediate_size": 64, "num_experts": 64, "num_experts_per_tok": 8, "vocab_size": 500}
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
    "data ranks that share states": (
        DENSE | {"vocab_size": 500},
        "bfloat16",
        {"parallel": {"data": 2}, "optimizer": {"distributed": True}},
        Grpo(),
    ),
    "context": (DENSE | {"vocab_size": 500}, "bfloat16", {"parallel": {"context": 2}}, Grpo()),
    "context, recomputed": (
        DENSE,
        "bfloat16",
        {"parallel": {"context": 2}, "recompute": "full"},
        Grpo(),
    ),
    "tensor and sequence": (
        DENSE | {"vocab_size": 500},
        "bfloat16",
        {"parallel": {"tensor": 2, "sequence_parallel": True}, "recompute": "selective"},
        Grpo(),
    ),
    "offloaded": (DENSE, "bfloat16", {"recompute": "full", "optimizer": {"offload": True}}, Grpo()),
    "offloaded, float32": (
        DENSE,
        "float32",
        {"recompute": "full", "optimizer": {"offload": True}},
        Grpo(),
    ),
    "offloaded by two, moments in bfloat16": (
        DENSE | {"vocab_size": 500},
        "bfloat16",
        {
            "parallel": {"data": 2},
            "optimizer": {"distributed": True, "offload": True, "states": "bfloat16"},
        },
        Grpo(),
    ),
    "moments in bfloat16": (
        DENSE,
        "bfloat16",
        {"recompute": "full", "optimizer": {"states": "bfloat16"}},
        Grpo(),
    ),
    "fused": (DENSE | {"vocab_size": 500}, "bfloat16", {"kernels": "fused"}, Grpo()),
    "fused, recomputed, offloaded": (
        DENSE,
        "bfloat16",
        {
            "kernels": "fused",
            "recompute": "full",
            "optimizer": {"offload": True, "states": "bfloat16"},
        },
        Grpo(),
    ),
    "experts": (
        MIXED | SHAPE | {"moe_intermediate_size": 128},
        "bfloat16",
        {"recompute": "full"},
        Grpo(),
    ),
    "many experts": (MIXED | SHAPE | MANY, "bfloat16", {"recompute": "none"}, Grpo()),
    "many experts, recomputed": (MIXED | SHAPE | MANY, "bfloat16", {"recompute": "full"}, Grpo()),
    "many experts, in one piece": (
        MIXED | SHAPE | MANY,
        "bfloat16",
        {"experts": "grouped"},
        Grpo(),
    ),
}


class KernelNorm(torch.autograd.Function):
    """Keeps what torch's kernel for GPUs keeps: its input. What it has on a CPU keeps two float32
    copies of it."""

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
            states += [
                value for one in group["params"] for value in part.optimizer.state[one].values()
            ]
    seen: set[int] = set()

    def fresh(tensors: list[Tensor]) -> int:
        storages = {
            one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in tensors
        }
        new = {where: size for where, size in storages.items() if where not in seen}
        seen.update(new)
        return sum(new.values())

    kinds = {
        "weights": parameters,
        "gradients": [one.main_grad for one in parameters],
        "optimizer states": states,
    }
    return {name: fresh(tensors) for name, tensors in kinds.items()}


@contextmanager
def one_of(layout: ParallelConfig, rank: int = 0) -> Iterator[None]:
    """One of its ranks."""
    import torch.testing._internal.distributed.fake_pg

    torch.set_num_threads(1)
    parallel.import_libraries("cpu", 0)
    dist.init_process_group("fake", store=dist.HashStore(), rank=rank, world_size=layout.ranks)
    try:
        parallel._create_groups(layout, 0, 60.0)
        yield
    finally:
        parallel.destroy()


class Unwritten(Peak):
    """Memory of which nothing is known is zero: the kernels that were to write it do not run."""

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(operation, types, args, kwargs)
        if operation in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default):
            result.zero_()
        return result


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch, kernels: str) -> None:
    """What only torch's operations for CPUs, or Triton's interpreter, take is not there."""
    monkeypatch.setattr(
        RMSNorm, "forward", lambda self, x: KernelNorm.apply(x, self.weight, self.eps)
    )
    monkeypatch.setattr(logprobs, "_add_product", add_product)
    if kernels == "fused":
        requires("triton")
        from triton.runtime.interpreter import GridExecutor

        monkeypatch.setattr(GridExecutor, "__call__", lambda *_, **__: None)
        monkeypatch.setattr(parity, "check", lambda *_: 0.0)


def run_of(
    hf: dict[str, Any], dtype: str, actor: dict[str, Any], algorithm: Grpo, folder: Path
) -> tuple[Config, Path]:
    """A colocated run, and its model."""
    settings = build(ActorConfig, actor | {"max_tokens_per_micro_batch": TOKENS})
    config = Config(
        actor=settings,
        algorithm=algorithm,
        model=ModelConfig(dtype=dtype),
        colocate=True,
        max_staleness=0,
    )
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = 1, ROW - 1
    return config, model(folder, hf)


def trainer_of(config: Config, directory: Path) -> Trainer:
    policy = PolicyModel(read_config(directory), config.model, config.actor.parallel, config.actor)
    policy.load_hf(directory)
    return Trainer.from_settings(policy, config.algorithm, config.actor, 1.0)


def whole_rows(tokens: int) -> list[dict[str, Any]]:
    """Rows of ``tokens``, all of them trained, that fill a micro-batch."""
    [row] = rows(1)
    long = {name: value.repeat(tokens)[:tokens] for name, value in row.items()}
    return [long | {"loss_mask": long["loss_mask"] * 0 + 1}] * (TOKENS // ROW)


def check_what_stays(trainer: Trainer, expected: Footprint) -> int:
    """The bytes of it that are on the device."""
    states = expected.resident["optimizer states"] + expected.pinned.get("optimizer states", 0)
    found = held(trainer)
    for name, size in found.items():
        assert size == pytest.approx(
            (dict(expected.resident) | {"optimizer states": states})[name], rel=0.01
        ), name
    return round(sum(expected.resident[name] for name in found))


@pytest.mark.parametrize("case", CASES)
def test_a_step_takes_what_was_worked_out(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that stay to 1 %, all of them at the worst moment to 10 %, and what a step takes of
    pieces."""
    config, directory = run_of(*CASES[case], tmp_path / "hf")
    settings = config.actor
    as_on_a_gpu(monkeypatch, settings.kernels)
    monkeypatch.setattr(adam, "PIECE", 2**16)
    monkeypatch.setattr(optimizer_memory, "CHUNK_ELEMENTS", 2**16)
    expected = roles.actor_footprint(config, spec_from_config(read_config(directory)), "actor", 1)
    with one_of(settings.parallel):
        trainer = trainer_of(config, directory)
        given = batch(whole_rows(ROW * settings.parallel.context), trainer.model.pack_split)
        with Unwritten() as passes:
            trainer.accumulate([given])
        # Of kernels that did not run.
        trainer.module.zero_grad_buffer()
        with Unwritten() as update:
            assert trainer.step(1e-6)["skipped"] == 0.0
        stays = check_what_stays(trainer, expected)
        with Peak() as gathering:
            sharded_state(trainer, loading=False)
        away = (
            0
            if settings.optimizer.offload
            else sum(one.nbytes for one in DeviceOffload(trainer)._copies)
        )
    # A checkpoint is counted apart: the half of it that is on a GPU is in host memory here. So is an
    # update: torch's Adam updates one parameter at a time on a CPU.
    worst = max(
        sum(parts.values())
        for moment, parts in expected.phases.items()
        if moment not in ("checkpoint", "update")
    )
    assert stays + worst == pytest.approx(stays + passes.bytes, rel=0.1)
    if type(trainer.optimizer.chained_optimizers[0].optimizer) is not torch.optim.AdamW:
        assert sum(expected.phases["update"].values()) == pytest.approx(update.bytes, rel=0.15)
    if settings.optimizer.distributed:
        assert expected.host["states gathered for a checkpoint"] == pytest.approx(
            gathering.bytes, rel=0.05
        )
    if not settings.optimizer.offload:
        assert expected.pinned["moved out for engines"] == pytest.approx(away, rel=0.01)


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_of_a_pipeline_takes_what_was_worked_out(
    stage: int, recompute: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two layers, and of one and the output layer; the first has begun two micro-batches when
    the last one ends."""
    actor = {"parallel": {"pipeline": 2, "last_stage_layers": 1}, "recompute": recompute}
    config, directory = run_of(
        DENSE | {"vocab_size": 500}, "bfloat16", actor, Grpo(), tmp_path / "hf"
    )
    as_on_a_gpu(monkeypatch, "plain")
    # What the other stage would say.
    shape = [TOKENS, 1, SHAPE["hidden_size"]]
    monkeypatch.setattr(P2PCommunicator, "_communicate_shapes", lambda *_: (shape, shape))
    spec = spec_from_config(read_config(directory))
    expected = roles._actor_stage(config, spec, "actor", 1, stage)
    with one_of(config.actor.parallel, stage):
        trainer = trainer_of(config, directory)
        stays = check_what_stays(trainer, expected)
        with Unwritten() as passes:
            trainer.accumulate([batch(whole_rows(ROW)) for _ in range(4)])
    worst = max(
        sum(expected.phases[name].values()) for name in ("backward", "output layer")[: 1 + stage]
    )
    assert stays + worst == pytest.approx(stays + passes.bytes, rel=0.1)


@pytest.mark.parametrize(
    "parallel",
    [
        {"data": 4, "expert": 2},
        {"tensor": 2, "sequence_parallel": True, "data": 2, "expert": 2},
        {"tensor": 2, "sequence_parallel": True, "data": 2},
    ],
    ids=str,
)
def test_experts_that_are_dealt_out_take_their_part(
    parallel: dict[str, Any], tmp_path: Path
) -> None:
    """Weights, gradients, and states that ranks with the same experts share: others than share the
    rest."""
    actor = {"parallel": parallel, "optimizer": {"distributed": True}}
    config, directory = run_of(MIXED | SHAPE, "bfloat16", actor, Grpo(), tmp_path / "hf")
    with one_of(config.actor.parallel):
        check_what_stays(
            trainer_of(config, directory),
            roles.actor_footprint(config, spec_from_config(read_config(directory)), "actor", 1),
        )
