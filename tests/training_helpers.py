"""A tiny model, rows and one-rank groups for the training tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.config.schema import AlgorithmConfig, ModelConfig, OptimizerConfig, ParallelConfig, TinyModelConfig
from relax_hpc.data.tiny_model import make_tiny_model
from relax_hpc.rendezvous.world import free_port
from relax_hpc.training import parallel
from relax_hpc.training.batches import Batch, collate
from relax_hpc.training.hf_files import read_config
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.trainer import Trainer
from relax_hpc.transfer_queue.schema import Row

SHAPE = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
ALGORITHM = AlgorithmConfig(kl_coefficient=0.1, entropy_coefficient=0.01)
EPS = 1e-6
"""Larger than the usual 1e-8, below which a gradient that is only rounding noise moves a weight by the whole rate."""
LR = 1e-3


@pytest.fixture(scope="module", name="one_rank")
def one_rank_fixture() -> Iterator[None]:
    """A group of one rank for a whole test file."""
    torch.set_num_threads(1)
    parallel.initialize(ParallelConfig(), 0, 1, 0, ("127.0.0.1", 0), "cpu", 0, 60.0)
    yield
    parallel.destroy()


@pytest.fixture(scope="module", name="tiny")
def tiny_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied model; see `tiny_model`."""
    return tiny_model(tmp_path_factory.mktemp("tiny"), tied=True)


def tiny_model(root: Path, tied: bool) -> Path:
    """A small model with weights large enough that its distributions are far from uniform."""
    from safetensors.torch import load_file, save_file

    directory = root / f"tied-{tied}"
    make_tiny_model(directory, TinyModelConfig(**SHAPE, tie_word_embeddings=tied), seed=1)
    generator = torch.Generator().manual_seed(2)
    weights = load_file(directory / "model.safetensors")
    for name, value in weights.items():
        weights[name] = value * 8 if value.dim() > 1 else value + 0.1 * torch.randn(value.shape, generator=generator)
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


def batch(samples: list[Row], multiple: int = 1) -> Batch:
    return collate(samples, 0, "cpu", multiple)


def policy(directory: Path, split: ParallelConfig | None = None, dtype: str = "float32") -> PolicyModel:
    model = PolicyModel(read_config(directory), ModelConfig(dtype=dtype), split or ParallelConfig())
    model.load_hf(directory)
    return model


def trainer(
    directory: Path, split: ParallelConfig | None = None, dtype: str = "float32", distributed: bool = False
) -> Trainer:
    optimizer = OptimizerConfig(lr=LR, eps=EPS, weight_decay=0.01, clip_grad=0.5, distributed=distributed)
    return Trainer(policy(directory, split, dtype), ALGORITHM, optimizer, temperature=0.9)


def launch(world: int, *args: object, timeout_s: float = 120.0) -> None:
    """Run `training_rank.py` in `world` processes; AssertionError with their output if one fails."""
    master = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [sys.executable, "-W", "ignore", "-m", "tests.training_rank", master, str(world)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), *map(str, args)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        for rank in range(world)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert [process.returncode for process in ranks] == [0] * world, "\n".join(outputs)
