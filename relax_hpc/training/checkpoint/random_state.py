"""Random states of one rank, in a safetensors file."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def random_state() -> dict[str, torch.Tensor]:
    """Copy of torch's generators and megatron-core's named ones."""
    return {name: state.cpu().clone() for name, state in _states().items()}


def save_random_state(state: dict[str, torch.Tensor], path: Path) -> None:
    """Write a result of `random_state`."""
    save_file(state, path)


def load_random_state(path: Path) -> None:
    """Inverse of `save_random_state`."""
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = load_file(path)
    torch.set_rng_state(states.pop("torch"))
    if "cuda" in states:
        torch.cuda.set_rng_state(states.pop("cuda"))
    get_cuda_rng_tracker().set_states(
        {name.removeprefix("named/"): state for name, state in states.items()}
    )


def _states() -> dict[str, torch.Tensor]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states | {
        f"named/{name}": state for name, state in get_cuda_rng_tracker().get_states().items()
    }
