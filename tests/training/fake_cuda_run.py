"""Training on a CUDA device whose tensors have no values; see `tests.helpers.fake_cuda`.

`python -m tests.training.fake_cuda_run CASE...` prints a line of JSON for each case: its name, and
the records of its passes and steps.
"""

from __future__ import annotations

import copy
import gc
import importlib
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from relax_hpc.algorithms import Algorithm, Grpo, Ppo
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.config.load import build
from relax_hpc.config.schema import ActorConfig, Config, ModelConfig, ParallelConfig
from relax_hpc.ops.plan import roles
from relax_hpc.queue.row_schema import Row
from relax_hpc.training import metric_sums, parallel, parity
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from tests.helpers import fake_cuda

MODELS = Path(__file__).parents[2] / "configs/models"
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 1024}
SMALL |= {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 2}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


@dataclass(frozen=True)
class Case:
    """A model, settings of its trainer, and the rows of a micro-batch."""

    model: str
    """Directory in configs/models, or "towers"."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Other values of config.json."""
    actor: Mapping[str, Any] = field(default_factory=dict)
    """The section `actor`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The section `model`."""
    algorithm: Algorithm = field(default_factory=Grpo)
    trains_values: bool = False
    """Whether it is a critic."""
    rows: int = 3
    length: int = 70
    steps: int = 2
    updates: bool = True
    """Whether steps update weights. With 1,000 experts this takes long."""

    def hf_config(self) -> dict[str, Any]:
        """The content of config.json."""
        if self.model == "towers":
            from tests.helpers.media_helpers import QWEN3_VL

            return copy.deepcopy(QWEN3_VL)
        return read_config(MODELS / self.model) | dict(self.changes)

    def config(self) -> Config:
        """The configuration of the run."""
        actor = build(ActorConfig, dict(self.actor))
        actor.max_tokens_per_micro_batch = self.rows * self.length
        model = ModelConfig(dtype="bfloat16", device="cuda", **self.settings)
        config = Config(actor=actor, model=model, algorithm=self.algorithm)
        prompt = self.length // 8
        config.data.max_prompt_tokens, config.rollout.max_new_tokens = prompt, self.length - prompt
        return config


def dense(**named: Any) -> Case:
    return Case("Qwen3-8B", SMALL, **named)


def mixture(experts: str, **actor: Any) -> Case:
    return Case("Qwen3-30B-A3B", SMALL | EXPERTS, actor | {"experts": experts})


RECOMPUTED = {"kernels": "fused", "recompute": "full"}
OFFLOADED = RECOMPUTED | {"optimizer": {"offload": True}}
PACKED = {"tower_attention": "packed"}
CASES: dict[str, Case] = {
    "fused": dense(actor={"kernels": "fused"}),
    "fused, recomputed": dense(actor=RECOMPUTED),
    "plain, selective": dense(actor={"kernels": "plain", "recompute": "selective"}),
    "entropy": dense(actor={"kernels": "plain"}, algorithm=Grpo(entropy_coefficient=0.1)),
    "moments in bfloat16": dense(actor={"kernels": "fused", "optimizer": {"states": "bfloat16"}}),
    "offloaded": dense(actor=OFFLOADED),
    "critic": dense(actor=RECOMPUTED, algorithm=Ppo(), trains_values=True),
    "context": dense(actor=RECOMPUTED | {"parallel": {"context": 2}}),
    "experts in one product": mixture("grouped", kernels="fused"),
    "experts in one product, recomputed": mixture("grouped", **RECOMPUTED),
    "experts one by one": mixture("sequential", kernels="fused"),
    "towers": Case("towers", actor={"kernels": "fused"}, settings=PACKED),
    "towers, recomputed": Case("towers", actor=RECOMPUTED, settings=PACKED),
}


def real_shapes() -> Iterator[tuple[str, Case]]:
    """Models with few layers and a row of 16,384 tokens."""
    long: dict[str, Any] = {"rows": 1, "length": 16384, "steps": 1}
    for layers in (2, 4):
        cut = {"num_hidden_layers": layers}
        yield f"8B, {layers} layers", Case("Qwen3-8B", cut, OFFLOADED, **long)
        for experts, count in (("grouped", 128), ("sequential", 128), ("grouped", 32)):
            name = f"30B-A3B, {count} experts {experts}, {layers} layers"
            changes = cut | {"num_experts": count}
            actor = OFFLOADED | {"experts": experts}
            yield name, Case("Qwen3-30B-A3B", changes, actor, updates=False, **long)


CASES |= dict(real_shapes())


def main() -> None:
    parallel.import_libraries("cuda", None, True)
    import torch.testing._internal.distributed.fake_pg  # noqa: F401

    if any(CASES[name].model == "towers" for name in sys.argv[1:]):
        # While torch says that there is no GPU: torchvision can be a build for GPUs.
        install_transformers_hook()
        importlib.import_module("transformers.models.qwen3_vl.modeling_qwen3_vl")
    device = fake_cuda.install()
    # Comparisons of values.
    parity.check = lambda *_: 0.0
    print(json.dumps({"case": "probes", **probe(device)}), flush=True)
    for name in sys.argv[1:]:
        try:
            result = run(CASES[name], device)
        except Exception:
            result = {"error": traceback.format_exc()}
        # Models and their optimizers refer to each other.
        gc.collect()
        print(json.dumps({"case": name, **result}), flush=True)


def probe(device: fake_cuda.FakeDevice) -> dict[str, Any]:
    """What is recorded of single operations."""
    acts: dict[str, Callable[[Tensor, Tensor], object]] = {
        "arithmetic": lambda x, mask: x.mul(2).add(x, alpha=0.5).sum(),
        "number": lambda x, mask: x + torch.ones(()),
        "item": lambda x, mask: float(x[0]),
        "tolist": lambda x, mask: x.tolist(),
        "copy": lambda x, mask: x.cpu(),
        "upload": lambda x, mask: torch.tensor([1.0], device="cuda"),
        "pageable": lambda x, mask: torch.ones(8).to("cuda", non_blocking=True),
        "pinned": lambda x, mask: torch.ones(8).pin_memory().to("cuda", non_blocking=True),
        "mask": lambda x, mask: x.index_put_((mask,), x[:1]),
        "index": lambda x, mask: x[torch.arange(8)],
        "synchronize": lambda x, mask: torch.cuda.current_stream().synchronize(),
        "memory": lambda x, mask: x.new_empty(1 << 20).add_(1).sum(),
    }
    records = {}
    with device:
        for name, act in acts.items():
            x = torch.ones(8, device="cuda")
            mask = x > 0
            with device.recording() as record:
                act(x, mask)
            records[name] = record.as_json()
    return {"records": records}


def run(case: Case, device: fake_cuda.FakeDevice) -> dict[str, Any]:
    """Records of building, scoring, and two passes and steps; and what `plan` calculates."""
    layout = case.config().actor.parallel
    records: dict[str, fake_cuda.Record] = {}
    with one_rank(layout), device, replaced_functions(device):
        with device.recording() as records["build"]:
            trainer = build_trainer(case)
        batches = [collate_rows(case, trainer)]
        with device.recording() as records["scores"]:
            score(trainer, batches)
        for number in range(1, 1 + case.steps):
            with device.recording() as records[f"accumulate {number}"]:
                trainer.accumulate(batches, last=True)
            if case.updates:
                with device.recording() as records[f"step {number}"]:
                    trainer.step(1e-6)
    results = {name: record.as_json() for name, record in records.items()}
    return {"records": results, "plan": planned_bytes(case)}


@contextmanager
def one_rank(layout: ParallelConfig) -> Iterator[None]:
    """Rank 0 of ``layout``. The other ranks do not exist; collectives do nothing."""
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=layout.ranks)
    try:
        parallel._create_groups(layout, 0, 60.0)
        yield
    finally:
        parallel.destroy()


def build_trainer(case: Case) -> Any:
    from relax_hpc.training.critic import CriticModel, CriticTrainer
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

    config = case.config()
    arguments = case.hf_config(), config.model, config.actor.parallel, config.actor
    if case.trains_values:
        critic = CriticModel(*arguments)
        return CriticTrainer.from_settings(critic, case.algorithm, config.actor, 1.0)
    return Trainer.from_settings(PolicyModel(*arguments), case.algorithm, config.actor, 1.0)


def collate_rows(case: Case, trainer: Any) -> Any:
    from relax_hpc.training.models.batches import collate

    split = trainer.model.pack_split
    if case.model == "towers":
        from tests.helpers.media_helpers import ROW_MEDIA, ROWS

        return collate(ROWS, 0, "cuda", split, media=ROW_MEDIA)
    return collate(random_rows(case, trainer.model.spec.vocab), 0, "cuda", split)


def random_rows(case: Case, vocab: int) -> list[Row]:
    """Rows whose first eighth is the prompt."""
    generator = np.random.default_rng(0)
    samples: list[Row] = []
    for _ in range(case.rows):
        mask = np.arange(case.length) >= case.length // 8
        values = generator.normal(-4.0, 0.3, case.length).astype(np.float32) * mask
        row: Row = dict.fromkeys(("old_logprobs", "rollout_logprobs", "advantages"), values)
        if case.trains_values:
            row |= {"values": values, "returns": values}
        ids = generator.integers(3, vocab - 1, case.length).astype(np.int32)
        samples.append(row | {"token_ids": ids, "loss_mask": mask.astype(np.uint8)})
    return samples


def score(trainer: Any, batches: list[Any]) -> None:
    """Log-probabilities, or values of a critic, without their copy to the host."""
    model = trainer.model
    if hasattr(model, "token_values"):
        model.batch_scores(batches, model.token_values)
    else:
        model.batch_logprobs(batches, 1.0)


@contextmanager
def replaced_functions(device: fake_cuda.FakeDevice) -> Iterator[None]:
    """Values that the host reads from the device and that sizes of tensors depend on."""
    from megatron.core.transformer.moe.experts import SequentialMLP

    from relax_hpc.base import host_memory

    plain_upload, plain_gather = metric_sums.upload, metric_sums.gather_padded
    plain_experts, plain_list = SequentialMLP.forward, fake_cuda.FakeTensor.tolist
    sizes: list[np.ndarray] = []

    def upload(values: np.ndarray, to: Any) -> Tensor:
        sizes.append(values)
        return plain_upload(values, to)

    def to_list(self: Any) -> Any:
        values = plain_list(self)
        # Weight, tokens, and bytes of new names of metrics.
        return [100.0, 100.0, sizes[-1].item()] if self.shape == (3,) else values

    def gather_padded(data: bytes, size: int, to: Any) -> list[bytes]:
        plain_gather(data, size, to)
        return [data]

    def run_experts(self: Any, tokens: Tensor, counts: Tensor, probs: Tensor) -> Any:
        counts.tolist()
        even = torch.full((len(counts),), len(tokens) // len(counts))
        even[: len(tokens) % len(counts)] += 1
        return plain_experts(self, tokens, even, probs)

    def gather_objects(results: list[Any], value: Any, group: Any = None) -> None:
        results[:] = [value] * len(results)

    changed: list[tuple[Any, str, Any]] = [
        (dist, "all_gather_object", gather_objects),
        (metric_sums, "upload", upload),
        (metric_sums, "gather_padded", gather_padded),
        (SequentialMLP, "forward", run_experts),
        (fake_cuda.FakeTensor, "tolist", to_list),
        (host_memory, "allocate_host_memory", device.allocate_host_memory),
    ]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in changed]
    for owner, name, value in changed:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


def planned_bytes(case: Case) -> dict[str, float]:
    """Bytes on the device by `relax-hpc plan`, of what stays and of each phase."""
    config, spec = case.config(), spec_from_config(case.hf_config())
    footprint = roles.actor_footprint(config, spec, "actor", 1)
    stays = sum(footprint.resident.values()) - footprint.resident["CUDA, NCCL"]
    phases = {name: sum(sizes.values()) for name, sizes in footprint.phases.items()}
    return {"stays": stays, **phases}


if __name__ == "__main__":
    main()
