"""Small models in every format that can be converted, and helpers to kill conversions."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file

from relax_hpc.convert.conversion import ConversionRequest, convert
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_mapping import all_pieces, stored_forms
from relax_hpc.training.models.pieces import StoredForm

M_MMAP_THRESHOLD = -3
VOCAB = 61
"""Size of the vocabulary. It is odd, so that two tensor-parallel ranks pad it."""
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "float32",
}
BIASED = {key: value for key, value in DENSE.items() if key != "attention_bias"} | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
}
"""A model of the family that examples/model_family.py adds."""
MIXED = DENSE | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
LLAMA = {key: value for key, value in DENSE.items() if key != "head_dim"} | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "mlp_bias": False,
    # As Llama 3.1 and later: positions are scaled from the slowest rotations on.
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def model(
    directory: Path,
    config: dict,
    packed: bool = False,
    files: int = 1,
    dtype: torch.dtype = torch.float32,
    head: bool = False,
    form: int = 0,
) -> Path:
    """Write a random model of ``config`` to the new folder ``directory``.

    ``packed``: experts in one tensor. ``form``: number of the stored form of each tensor. ``head``:
    store the head although the embedding is tied.
    """
    spec, generator = spec_from_config(config), torch.Generator().manual_seed(5)

    def draw(size: tuple[int, ...]) -> torch.Tensor:
        noise = torch.randn(size, generator=generator)
        return (1 + 0.1 * noise if len(size) == 1 else 0.3 * noise).to(dtype)

    pieces = {name: draw(piece.shape) for name, piece in all_pieces(spec).items()}
    forms = stored_forms(spec)
    names = [
        name for name in forms if ("experts." in name) <= (packed == (not name.endswith(".weight")))
    ]
    if spec.tied and not head:
        names.remove("lm_head.weight")
    tensors = {name: stored_tensor(forms[name][form], pieces) for name in names}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(
        json.dumps(config | {"torch_dtype": str(dtype).removeprefix("torch.")})
    )
    (directory / "tokenizer_config.json").write_text("{}")
    file_by_name = {}
    for number in range(files):
        name = (
            "model.safetensors"
            if files == 1
            else f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        )
        tensors_of_file = {key: tensors[key] for key in names[number::files]}
        save_file(tensors_of_file, directory / name, metadata={"format": "pt"})
        file_by_name |= dict.fromkeys(tensors_of_file, name)
    if files > 1:
        (directory / "model.safetensors.index.json").write_text(
            json.dumps({"metadata": {}, "weight_map": file_by_name})
        )
    return directory


def stored_tensor(form: StoredForm, pieces: dict[str, torch.Tensor]) -> torch.Tensor:
    """The tensor with all ``pieces`` of ``form``, as a file has it."""
    if form.transposed:
        blocks = [torch.cat([pieces[piece.name] for piece in block]).t() for block in form.blocks]
        return torch.stack(blocks)
    return torch.cat([pieces[piece.name].flatten() for piece in form.pieces]).view(form.shape)


def content(directory: Path) -> dict[str, bytes]:
    """All files below `directory`."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


def to(source: Path, target: Path, **options: object) -> dict:
    """The report of a conversion."""
    return convert(ConversionRequest(source=source, target=target, **options))


@contextmanager
def bounded_data(room: int) -> Iterator[None]:
    """Limit the private memory of this process to ``room`` bytes above its current size. Mapped
    files do not count."""
    # glibc raises its threshold after a free and keeps freed blocks. With a fixed threshold it
    # returns blocks of 128 KiB and more to the kernel immediately.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 17)
    _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text().splitlines()
    data_kib = next(line for line in status if line.startswith("VmData")).split()[1]
    resource.setrlimit(resource.RLIMIT_DATA, (int(data_kib) * 1024 + room, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (hard_limit, hard_limit))


def in_child(act: Callable[[], object]) -> int:
    """The exit code of a child process that calls ``act``. If a signal ended it, its negative number."""
    child = multiprocessing.get_context("fork").Process(target=act)
    child.start()
    child.join(60)
    return child.exitcode


def kill_at(number: int) -> Callable[..., None]:
    """A function that kills its process, as `kill -9` does, when it is called for the `number`th
    time."""
    calls = iter(range(1, number))

    def act(*_: object) -> None:
        if next(calls, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)

    return act
