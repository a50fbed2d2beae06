"""Models, references and processes for the engines' tests."""

from __future__ import annotations

import asyncio
import functools
import os
from pathlib import Path

import psutil
import torch
from safetensors.torch import load_file, save_file

from relax_hpc.base.processes import all_processes
from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config, EngineConfig, TinyModelConfig
from relax_hpc.rollout.engines.engine import Draft, Engine, GenerateRequest, Generation, Sampling
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import EOS_ID
from relax_hpc.training.weights.manifest import Chunk, Manifest, checksum
from relax_hpc.training.weights.slab import MARK
from relax_hpc.training.weights.tensors import SafetensorsFile, TensorInfo, TensorPart
from relax_hpc.training.weights.version_files import TENSORS, copy_small

TOKEN = "b7d2-a-token-that-only-this-test-knows"


def make_model(directory: Path, seed: int) -> Path:
    """A random model whose next token depends strongly on all tokens before, and is hardly ever the
    end token."""
    make_tiny_model(directory, TinyModelConfig(), seed)
    weights = load_file(directory / "model.safetensors")
    scaled = {name: value * (20 if value.ndim > 1 else 1) for name, value in weights.items()}
    scaled["model.embed_tokens.weight"][EOS_ID] = 0
    save_file(scaled, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def start_and_close(engine: Engine) -> None:
    """Start an engine, and close it also if it does not start."""

    async def run() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    asyncio.run(run())


def make_slab(model: Path, version: Version, root: Path) -> Path:
    """What a node has of ``version`` when it was pulled: the weights of ``model`` in one file, and
    what they are."""
    folder = root / str(version)
    folder.mkdir(mode=0o700, parents=True)
    copy_small(model, folder)
    described, record, parts = {}, b"", []
    for name, value in load_file(model / "model.safetensors").items():
        described[name] = TensorInfo(
            {torch.float32: "F32", torch.bfloat16: "BF16"}[value.dtype], tuple(value.shape)
        )
        parts.append(TensorPart(name, 0, 0, len(value), len(record)))
        record += value.view(torch.uint8).numpy().tobytes()
    with SafetensorsFile(folder / TENSORS, described) as file:
        for part in parts:
            file.put(part, memoryview(record))
    whole = Chunk("all", len(record), checksum(record), tuple(parts))
    (folder / MARK).write_bytes(Manifest(str(version), described, (whole,)).encode())
    return folder


def make_config(kind: str, **engine: object) -> Config:
    """The default configuration with an engine of `kind`."""
    config = Config()
    config.rollout.engine = EngineConfig(kind=kind, **engine)
    config.liveness.stop_timeout_s = 5.0
    return config


def request(kind: int, sample: int = 0, draft: Draft | None = None) -> GenerateRequest:
    """What the fake server answers by its first token."""
    return GenerateRequest((kind, 5), "p", sample, Sampling(1.0, 1.0, (), 0), 4, draft=draft)


@functools.cache
def reference_model(directory: Path) -> torch.nn.Module:
    """Hugging Face's model, loaded its own way."""
    install_transformers_hook()
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


@torch.inference_mode()
def reference_logprobs(
    directory: Path, prompt: tuple[int, ...], response: list[int], temperature: float
) -> list[float]:
    """Log-probabilities of `response` by one forward pass over prompt and response."""
    ids = torch.tensor([[*prompt, *response]])
    logits = reference_model(directory)(ids).logits[0, len(prompt) - 1 : -1]
    return (
        (logits / temperature)
        .log_softmax(-1)
        .gather(-1, torch.tensor(response)[:, None])[:, 0]
        .tolist()
    )


@torch.inference_mode()
def reference_logprobs_in_place(
    drawn_by: list[Path], prompt: tuple[int, ...], response: list[int]
) -> list[float]:
    """The same at temperature 1, where the model of `drawn_by` drew each token with the keys and
    values of those before by the models that were there then."""
    ids, cache, found = [*prompt, *response], None, []
    starts = [at for at, model in enumerate(drawn_by) if at == 0 or model != drawn_by[at - 1]]
    for start, stop in zip(starts, [*starts[1:], len(response)], strict=True):
        first = len(prompt) + start - 1 if start else 0
        inputs = torch.tensor([ids[first : len(prompt) + stop - 1]])
        output = reference_model(drawn_by[start])(inputs, past_key_values=cache, use_cache=True)
        cache, logits = output.past_key_values, output.logits[0, start - stop :]
        drawn = torch.tensor(response[start:stop])[:, None]
        found += logits.log_softmax(-1).gather(-1, drawn)[:, 0].tolist()
    return found


def reference_logprobs_recomputed(
    drawn_by: list[Path], prompt: tuple[int, ...], response: list[int]
) -> list[float]:
    """The same, each model with keys and values of its own."""
    whole = {model: reference_logprobs(model, prompt, response, 1.0) for model in set(drawn_by)}
    return [whole[model][at] for at, model in enumerate(drawn_by)]


def error_against(
    directory: Path, prompt: tuple[int, ...], found: Generation, temperature: float = 1.0
) -> float:
    """Largest difference of the generation's log-probabilities to the reference's."""
    expected = reference_logprobs(directory, prompt, found.token_ids, temperature)
    return max(abs(one - other) for one, other in zip(found.logprobs, expected, strict=True))


def session_of(leader: int) -> list[psutil.Process]:
    """Living processes of a session."""
    found = []
    for process in all_processes():
        try:
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.Error):
            continue
    return found
