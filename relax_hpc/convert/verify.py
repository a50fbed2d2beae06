"""Verification of a conversion: digests of all tensors, and logits of both models on a prompt."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any, Literal, Protocol, cast

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.convert.hf_tensors import bytes_of
from relax_hpc.data.tokenizer import TokenizerError, load_backend, without_panics
from relax_hpc.training import parallel
from relax_hpc.training.models.batches import collate
from relax_hpc.training.models.families import FAMILIES
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.hf_mapping import all_pieces
from relax_hpc.training.models.spec import ModelSpec

START_TIMEOUT_S = 60.0
DEFAULT_PROMPT_TOKENS = 32
TOLERANCE = 1e-2
"""Tolerance of logits, as a share of the largest. Rounding in float32 stays far below, and a wrong
mapping is far above."""


class PieceSource(Protocol):
    """One side of a comparison: tensors by the names of pieces."""

    def dtype(self, name: str) -> torch.dtype:
        """Type of a piece."""

    def read(self, name: str) -> Tensor:
        """Read a piece."""


def digest(tensor: Tensor) -> str:
    """XXH3 (128 bits) of a tensor's bytes."""
    return xxhash.xxh3_128(bytes_of(tensor)).hexdigest()


def compare_tensors(source: PieceSource, target: PieceSource, spec: ModelSpec) -> dict[str, str]:
    """Digest of every tensor, read again from both sides.

    The source's tensors are converted to the target's types. ConfigError names tensors that differ.
    """
    digests, differing = dict[str, str](), list[str]()
    for name in all_pieces(spec):
        digests[name] = digest(target.read(name))
        if digest(source.read(name).to(target.dtype(name))) != digests[name]:
            differing.append(name)
    if differing:
        raise ConfigError(
            f"verify: {len(differing)} of {len(digests)} tensors differ: {', '.join(differing[:3])}"
        )
    return digests


def compare_logits(hf: Path, megatron: Path, spec: ModelSpec, ids: list[int]) -> dict[str, float]:
    """Largest difference of the two models' logits. ConfigError: it is above the tolerance."""
    expected, actual = hf_logits(hf, ids), megatron_logits(megatron, spec, ids)
    largest, difference = float(expected.abs().max()), float((expected - actual).abs().max())
    # A difference of NaN is refused too.
    if not difference <= TOLERANCE * largest:
        raise ConfigError(
            f"verify: logits differ by {difference:.3g}, the largest is {largest:.3g}"
        )
    return {"tokens": len(ids), "largest": largest, "largest_difference": difference}


def prompt_ids(prompt: str, directory: Path, vocab: int) -> list[int]:
    """Token ids of a prompt: numbers separated by commas, or a text for the tokenizer.

    An empty prompt stands for arbitrary tokens. ``directory``: the folder of the tokenizer.
    """
    if not prompt:
        return [(7 * position + 3) % vocab for position in range(DEFAULT_PROMPT_TOKENS)]
    if re.fullmatch(r"\d+(,\d+)*", prompt):
        ids = [int(number) for number in prompt.split(",")]
    else:
        ids = _tokenize(prompt, directory)
    if not ids or max(ids) >= vocab:
        raise ConfigError(
            f"--prompt: found token ids {ids[:8]}, allowed: at least one, each below {vocab}"
        )
    return ids


def _tokenize(text: str, directory: Path) -> list[int]:
    path = directory / "tokenizer.json"
    try:
        with without_panics():
            return load_backend(path).encode(text).ids
    except (ConfigError, TokenizerError) as error:
        raise ConfigError(f"--prompt: {error}; give token ids with commas between") from error


@torch.no_grad()
def hf_logits(directory: Path, ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of transformers' model in float32."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    kind = getattr(transformers, FAMILIES[read_config(directory)["model_type"]].architecture)
    model = kind.from_pretrained(directory, dtype=torch.float32, local_files_only=True)
    # Qwen3-Omni has two models; `thinker` is the language model.
    model = getattr(model, "thinker", model).to(_device()).eval()
    return model(torch.tensor([ids], device=model.device)).logits[0].cpu()


@torch.no_grad()
def megatron_logits(directory: Path, spec: ModelSpec, ids: list[int]) -> Tensor:
    """Logits [tokens, vocabulary] of megatron-core's model in float32, loaded by megatron-core."""
    starts_group = not dist.is_initialized()
    if starts_group:
        parallel.initialize_alone(_device(), 0, START_TIMEOUT_S)
    try:
        from relax_hpc.training.models.megatron import transformer_config

        config = transformer_config(spec, ModelConfig(device=_device()), ParallelConfig())
        module = spec.build(config, _device(), first=True, last=True).eval()
        load_module(module, directory)
        hidden = module(**spec.inputs(collate([{"token_ids": ids}], 0, _device())))
        return module.logits(hidden)[0, :, : spec.vocab].float().cpu()
    finally:
        if starts_group:
            parallel.destroy()


def load_module(module: torch.nn.Module, directory: Path) -> None:
    """Load this rank's shard of a megatron-core model; all ranks have to call it.

    The checkpoint may have been saved under any split.
    """
    from megatron.core import dist_checkpointing

    # torch's types know `sharded_state_dict` of megatron-core's modules only as a tensor.
    state = {"model": cast(Any, module).sharded_state_dict(prefix="")}
    with warnings.catch_warnings():
        # megatron-core 0.16.1 calls functions that torch 2.13 marks as deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        module.load_state_dict(dist_checkpointing.load(state, str(directory))["model"])


def _device() -> Literal["cpu", "cuda"]:
    return "cuda" if torch.cuda.is_available() else "cpu"
