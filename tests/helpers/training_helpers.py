"""A tiny model, rows and one-rank groups for the training tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from relax_hpc.algorithms import Algorithm, Distill, Dpo, Grpo, Ppo, Sft
from relax_hpc.algorithms.base import KlConfig
from relax_hpc.base.versions import Version
from relax_hpc.config.load import build
from relax_hpc.config.schema import (
    ActorConfig,
    Config,
    GroupConfig,
    ModelConfig,
    ParallelConfig,
    TinyModelConfig,
)
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from relax_hpc.queue.row_schema import Row
from relax_hpc.roles.inner_forward import InnerRoles
from relax_hpc.training import parallel
from relax_hpc.training.checkpoint import store
from relax_hpc.training.checkpoint.saver import Saver
from relax_hpc.training.critic import CriticModel, CriticTrainer
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import UNSPLIT, Batch, collate, idle_batch
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.packs import PackSplit
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.trainer import Trainer
from tests.helpers.queue_helpers import small
from tests.helpers.queue_in_memory import InMemory
from tests.requirements import DEVICE

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ALGORITHM = Grpo(kl=KlConfig(coefficient=0.1), entropy_coefficient=0.01)
EPS = 1e-6
"""Larger than the usual 1e-8, below which a gradient that is only rounding noise moves a weight by
the whole rate."""
LR = 1e-3
CLOSE = 1e-5 if DEVICE == "cpu" else 1e-4
"""Two optimizer steps in float32 whose sums were made in other orders."""
TOP_K = 5
"""Tokens that a teacher gives."""
ARRIVAL = (2, 0, 3, 1)
"""Of four prompt groups."""


@pytest.fixture(scope="module", name="one_rank")
def one_rank_fixture() -> Iterator[None]:
    """A group of one rank for a whole test file."""
    torch.set_num_threads(1)
    # Where there is no such kernel it warns: megatron-core has some.
    torch.use_deterministic_algorithms(DEVICE != "cpu", warn_only=True)
    parallel.initialize_alone(DEVICE, 0, 60.0)
    yield
    parallel.destroy()
    torch.use_deterministic_algorithms(False)
    # Models and their optimizers are rings: the next file has the whole of a GPU.
    gc.collect()
    if DEVICE != "cpu":
        torch.cuda.empty_cache()


@pytest.fixture(scope="module", name="tiny")
def tiny_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model; see `tiny_model`."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), tied=True)


def tiny_model(root: Path, tied: bool, **shape: int) -> Path:
    """A small model with weights large enough that its distributions are far from uniform."""
    from safetensors.torch import load_file, save_file

    directory = root / f"tied-{tied}"
    make_tiny_model(directory, TinyModelConfig(**SHAPE | shape, tie_word_embeddings=tied), seed=1)
    generator = torch.Generator().manual_seed(2)
    weights = load_file(directory / "model.safetensors")
    for name, value in weights.items():
        weights[name] = (
            value * 8
            if value.dim() > 1
            else value + 0.1 * torch.randn(value.shape, generator=generator)
        )
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def rows(count: int, seed: int = 0) -> list[Row]:
    """Samples of 6 prompt tokens and 2 to 9 response tokens with everything that training needs."""
    rng = np.random.default_rng(seed)
    result = []
    for _ in range(count):
        length = int(rng.integers(8, 16))
        mask = np.arange(length) >= 6

        def noise(scale: float, shift: float = 0.0, mask: np.ndarray = mask) -> np.ndarray:
            return ((rng.normal(size=len(mask)) * scale + shift) * mask).astype(np.float32)

        old = noise(0.3, -4.0)
        result.append(
            {
                "token_ids": rng.integers(3, 64, length).astype(np.int32),
                "loss_mask": mask.astype(np.uint8),
                "old_logprobs": old,
                "rollout_logprobs": old + noise(0.1),
                "ref_logprobs": old + noise(0.2),
                "advantages": noise(1.0),
            }
        )
    return result


def streamed(samples: list[Row], ranks: int, arrival: Sequence[int]) -> list[list[list[list[Row]]]]:
    """[window][rank][micro-batch] of rows as an actor gets them while their prompt groups of two
    come in any order."""
    config = small(len(samples) // 2, 2, steps=1)
    config.groups = {name: GroupConfig(roles=[name]) for name in ("rollout", "actor")}
    service, keys, windows = InMemory(Plan.from_config(config)), count(), []

    def ask(group: str, op: str, **args: Any) -> Any:
        return service.ask(group, 1, f"k{next(keys)}", op, **args)

    version, budget = Version(1, 0), min(ranks, 2) * 35
    window = {"task": "actor", "budget": budget, "boundary": config.prompts_per_step}
    ask("actor", "resume", step=0)
    ask("actor", "publish", version=str(version), digest="d")
    ask("rollout", "serve", reader="r", version=str(version))
    ask("rollout", "admit", reader="r", count=len(samples))
    for ticket in arrival:
        lengths = pack_lengths(
            [len(row["token_ids"]) for row in samples[2 * ticket : 2 * ticket + 2]]
        )
        summary = {
            "ticket": ticket,
            "episodes": b"\1\1",
            "lengths": lengths,
            "versions": [version.encode()],
        }
        ask("rollout", "put", shard={"name": f"s{ticket}"}, rows=[summary], fields=list(GENERATED))
        while claim := ask(
            "actor", "claim", **window, ranks=ranks, max_tokens=20, batch=len(windows)
        ):
            rows = [row for held in claim["tickets"] for row in samples[2 * held : 2 * held + 2]]
            windows.append(
                [
                    [[rows[number] for number in part] for part in rank]
                    for rank in claim["assignment"]
                ]
            )
    return windows


def batch(samples: list[Row], split: PackSplit = UNSPLIT) -> Batch:
    return collate(samples, 0, DEVICE, split)


def policy(
    directory: Path,
    split: ParallelConfig | None = None,
    dtype: str = "float32",
    actor: ActorConfig | None = None,
) -> PolicyModel:
    model = PolicyModel(
        read_config(directory),
        ModelConfig(dtype=dtype, device=DEVICE),
        split or ParallelConfig(),
        actor,
    )
    model.load_hf(directory)
    return model


def actor_settings(**settings: Any) -> ActorConfig:
    """An `actor` section with the optimizer of these tests; nested settings as in a file."""
    usual = {"lr": LR, "eps": EPS, "weight_decay": 0.01, "clip_grad": 0.5}
    return build(ActorConfig, settings | {"optimizer": usual | settings.get("optimizer", {})})


def trainer(directory: Path, dtype: str = "float32", **settings: Any) -> Trainer:
    """`settings` of the actor, see `actor_settings`."""
    actor = actor_settings(**settings)
    return Trainer.from_settings(
        policy(directory, actor.parallel, dtype, actor), ALGORITHM, actor, temperature=0.9
    )


def critic(directory: Path, **settings: Any) -> CriticTrainer:
    """`settings` of the critic, as of `trainer`; PPO's value loss."""
    section = actor_settings(**settings)
    model = CriticModel(
        read_config(directory), ModelConfig(device=DEVICE), section.parallel, section
    )
    model.load_hf(directory)
    return CriticTrainer.from_settings(model, Ppo(), section, temperature=1.0)


def valued(samples: list[Row]) -> list[Row]:
    """``samples`` with values, some of which are near to what a critic begins with, and returns."""
    return [
        row | {"values": row["ref_logprobs"] * 0.04, "returns": row["advantages"] + 0.5}
        for row in samples
    ]


def learned_from_files(ours: Trainer) -> list[dict[str, float]]:
    """Metrics of a step of sft and of one of dpo, on three pairs: with two data ranks one has a
    micro-batch less."""
    layout, split, samples, metrics = ours.model.layout, ours.model.pack_split, rows(6, seed=11), []
    mine = [samples[first : first + 2] for first in range(0, 6, 2)][
        layout.data_rank :: layout.data_size
    ]
    for ours.algorithm in (Sft(), Dpo()):
        parts = [batch(pair, split) for pair in mine]
        parts += [idle_batch(samples[0], DEVICE, split)] * (-(-3 // layout.data_size) - len(parts))
        ours.accumulate(parts)
        metrics.append(ours.step(LR))
    return metrics


def distiller(directory: Path, algorithm: Algorithm | None = None, **settings: Any) -> Trainer:
    """As `trainer`, of a policy that learns from a teacher's likeliest tokens; see `taught`."""
    actor = actor_settings(**settings)
    learnt = algorithm or Distill(divergence="jsd", teacher_top_k=TOP_K)
    return Trainer.from_settings(
        policy(directory, actor.parallel, actor=actor), learnt, actor, temperature=0.9
    )


def taught(samples: list[Row], seed: int = 0) -> list[Row]:
    """``samples`` with the likeliest tokens of a teacher who thinks otherwise than any model."""
    rng = np.random.default_rng(seed)
    sizes = [(len(row["token_ids"]), TOP_K) for row in samples]
    ids = [
        rng.permuted(np.tile(np.arange(64, dtype=np.int32), (size[0], 1)), axis=1)[:, :TOP_K]
        for size in sizes
    ]
    scores = [
        np.log(rng.dirichlet(np.ones(TOP_K + 1), size[0])[:, :TOP_K]).astype(np.float32)
        for size in sizes
    ]
    return [
        row | {"teacher_top_ids": which, "teacher_top_logprobs": score}
        for row, which, score in zip(samples, ids, scores, strict=True)
    ]


def inner_roles(model: PolicyModel, **settings: Any) -> InnerRoles:
    """Both forward roles in the actor; the present weights are the reference's. `settings` of the
    algorithm."""
    config = Config(algorithm=Grpo(**{"mini_batches": 2} | settings))
    config.actor.forward = ["actor_fwd", "reference"]
    config.rollout.temperature = 0.9
    return InnerRoles(model, config, Path())


class Peak(TorchDispatchMode):
    """The most bytes that were there at once of what operations have made since it began."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self._made = 0, dict[int, Any]()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        given = {
            one.untyped_storage()._cdata
            for one in tree_leaves((args, kwargs))
            if isinstance(one, Tensor)
        }
        result = operation(*args, **(kwargs or {}))
        for one in tree_leaves(result):
            if isinstance(one, Tensor) and (storage := one.untyped_storage())._cdata not in given:
                self._made[storage._cdata] = weakref.ref(storage)
        alive = {
            key: storage for key, made in self._made.items() if (storage := made()) is not None
        }
        self._made = {key: self._made[key] for key in alive}
        # megatron-core empties storages that it will compute again.
        self.bytes = max(self.bytes, sum(storage.nbytes() for storage in alive.values()))
        return result


START = """
from runpy import run_module
from relax_hpc.base.imports import fast_imports
with fast_imports(for_good=True):
    import {module}
    from relax_hpc.training.parallel import import_libraries
    import_libraries("cpu", None, trains=True)
run_module("{module}", run_name="__main__")
"""
"""As a role imports: most of what a rank takes, and no garbage when megatron-core collects some at
a save."""


def launch(
    world: int,
    *args: object,
    timeout_s: float = 120.0,
    module: str = "tests.training.training_rank",
) -> None:
    """Run `module` in `world` processes; AssertionError with their output if one fails."""
    codes, outputs = ends(world, *args, timeout_s=timeout_s, module=module)
    assert codes == [0] * world, "\n".join(outputs)


def ends(world: int, *args: object, timeout_s: float, module: str) -> tuple[list[int], list[str]]:
    """Exit codes and outputs of `world` processes of `module`, by rank."""
    meeting = os.memfd_create("meeting")
    file = f"/proc/{os.getpid()}/fd/{meeting}"
    command = [sys.executable, "-W", "ignore", "-c", START.format(module=module), file, str(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parents[2],
            env=os.environ | {"GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
    finally:
        os.close(meeting)
        for process in ranks:
            process.kill()
    return [process.returncode for process in ranks], outputs


def save(directory: Path, ours: Trainer, meta: dict[str, Any]) -> str:
    """A checkpoint, written when this returns; the digest of its marker."""
    digests: list[str] = []
    saver = Saver(ours, RankChannel(60.0), 60.0)
    saver.save(directory, meta, digests.append)
    saver.settle()
    return digests[0] if digests else ""


def load(directory: Path, ours: Trainer, digest: str | None = None) -> dict[str, Any]:
    """Its meta."""
    return store.load(directory, ours, RankChannel(60.0), digest)
