"""A small engine in this process: slow, and on a CPU reproducible bit for bit whatever is generated beside a sample."""

from __future__ import annotations

import asyncio
import hashlib
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from relax_hpc.config.schema import Config
from relax_hpc.engines.deadline import Silence
from relax_hpc.engines.engine import (
    Draft,
    EngineFault,
    GenerateRequest,
    Generation,
    Sampling,
    check_generation,
    require_model,
)
from relax_hpc.errors import ConfigError
from relax_hpc.imports import many_imports
from relax_hpc.versions import Version

_IMPORTING = threading.Lock()

if TYPE_CHECKING:
    import torch


def keyed_uniform(seed: int, prompt_id: str, sample: int, position: int) -> float:
    """A uniform number in [0, 1) that depends on its key alone: 53 bits of BLAKE2b. `position` 0 is the first token
    after the prompt.
    """
    key = f"{seed}\0{prompt_id}\0{sample}\0{position}".encode()
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 11) * 2.0**-53


def sample_token(logits: torch.Tensor, temperature: float, top_p: float, uniform: float) -> tuple[int, float]:
    """A token of `logits` [vocabulary] and its log-probability in nats.

    The inverse of the cumulative distribution, in float64 and in the order of token ids, at `uniform`. `top_p` keeps
    the most probable tokens up to that mass. The log-probability is float32 log_softmax(logits / temperature), before
    top_p. Temperature 0 takes the most probable token, with its log-probability at temperature 1.
    """
    logprobs = (logits.float() / (temperature or 1.0)).log_softmax(-1).cpu()
    if temperature == 0:
        token = int(logprobs.argmax())
    else:
        token = _inverse_cdf(_top_p(logprobs.double().exp().numpy(), top_p), uniform)
    return token, float(logprobs[token])


def _top_p(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Zero where the mass of strictly more probable tokens (ties: smaller ids first) reaches `top_p`."""
    if top_p >= 1:
        return probabilities
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    kept = np.where(before < top_p, probabilities[order], 0.0)
    kept[0] = probabilities[order[0]]
    return kept[np.argsort(order)]


def _inverse_cdf(weights: np.ndarray, uniform: float) -> int:
    cumulative = np.cumsum(weights)
    token = int(np.searchsorted(cumulative, uniform * cumulative[-1], side="right"))
    # Rounding may put the point at the very end.
    return min(token, int(np.flatnonzero(weights)[-1]))


class TransformersEngine:
    """`Engine` by Hugging Face's model, one sample at a time with its cache of keys and values."""

    name = "transformers"
    phase = "transformers is loading weights"
    pause_s = 0.0

    def __init__(
        self, config: Config, replica: int, model_dir: Path, version: Version, place: int | None = None
    ) -> None:
        number = replica if place is None else place
        self._device = f"cuda:{number}" if config.model.device == "cuda" else config.model.device
        self._dtype, self._silence = config.model.dtype, Silence(config.rollout.engine.request_timeout_s)
        self._model_dir, self._version = model_dir, version
        self._partial = config.rollout.partial_rollout
        self._lock = threading.Lock()
        """Held while the weights are looked at or changed: for a token, or for a whole sample."""

    async def start(self) -> None:
        """See `Engine.start`. Sets this process's torch to one thread: sums then have one order."""
        require_model(self._model_dir)
        self._model, self._stops = await asyncio.to_thread(_build, self._model_dir, self._dtype)
        try:
            await asyncio.to_thread(move, self._model, self._device)
            await asyncio.to_thread(load_weights, self._model, self._model_dir)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {error}") from error

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Generation | EngineFault]:
        """See `Engine.generate`."""
        answers, loop = [], asyncio.get_running_loop()

        def told() -> None:
            loop.call_soon_threadsafe(self._silence.heard)

        try:
            async with self._silence.limited():
                for request in requests:
                    answers.append(await asyncio.to_thread(self._generate, request, sampling, told))
        except TimeoutError as error:
            detail = f"no token for {self._silence.seconds} s, after {len(answers)} of {len(requests)} answers"
            raise EngineFault("timeout", detail) from error
        return [check_generation(answer, sampling.max_new_tokens) for answer in answers]

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`."""
        try:
            await asyncio.to_thread(self._swap, directory, version)
        except (OSError, ValueError) as error:
            raise EngineFault("update_failed", f"{version} from {directory}: {error}") from error

    async def release(self) -> None:
        """See `Engine.release`."""
        await asyncio.to_thread(move, self._model, "cpu")

    async def wait_dead(self) -> str:
        """Never returns: there is no process but this one."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Nothing to end."""

    def _swap(self, directory: Path, version: Version) -> None:
        with self._lock:
            started = time.monotonic()
            move(self._model, self._device)
            load_weights(self._model, directory)
            self._version, self.pause_s = version, time.monotonic() - started

    def _generate(self, request: GenerateRequest, sampling: Sampling, told: Callable[[], None]) -> Generation:
        if self._partial != "off":
            return self._draw(request, sampling, self._lock, told)
        with self._lock:
            return self._draw(request, sampling, nullcontext(), told)

    def _draw(
        self, request: GenerateRequest, sampling: Sampling, lock: AbstractContextManager, told: Callable[[], None]
    ) -> Generation:
        """``told`` is called for every token."""
        import torch

        stops = self._stops | set(sampling.stop_token_ids)
        draft = request.draft or Draft()
        drawn, cache, version = Draft.of(draft.so_far()), None, 0
        reason: Literal["stop", "length"] = "length"
        for position in range(len(drawn.token_ids), sampling.max_new_tokens):
            with lock, torch.inference_mode():
                before, version = version, self._version.encode()
                if self._partial == "recompute" and version != before:
                    cache = None
                inputs = drawn.token_ids[-1:] if cache is not None else [*request.prompt_ids, *drawn.token_ids]
                ids = torch.tensor([inputs], device=self._model.device)
                output = self._model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1)
            uniform = keyed_uniform(sampling.seed, request.prompt_id, request.sample, position)
            token, logprob = sample_token(output.logits[0, -1], sampling.temperature, sampling.top_p, uniform)
            drawn.add([token], [logprob], [version])
            told()
            if token in stops:
                reason = "stop"
                break
            cache = output.past_key_values
            if position + 1 < sampling.max_new_tokens:
                draft.add([token], [logprob], [version])
        draft.ended = replace(drawn.so_far(), finish_reason=reason)
        return draft.ended


def _build(directory: Path, dtype: str) -> tuple[Any, set[int]]:
    """The model of `directory` without its weights, and its end tokens."""
    from relax_hpc.engines.sglang.cpu import install_transformers_hook

    with many_imports():
        import torch

        torch.set_num_threads(1)
        install_transformers_hook()
        # Its modules load on first use, which two threads at once break.
        with _IMPORTING:
            from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        ends = config.eos_token_id
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).eval()
    return model, set(ends if isinstance(ends, list) else [ends]) - {None}


def move(model: Any, device: str) -> None:
    """Have ``model`` on ``device``. ConfigError: there is no such device here, or no room on it."""
    try:
        model.to(device)
    except (AssertionError, RuntimeError) as error:
        # Of a build without CUDA; of a GPU that is not there, or is full.
        first = str(error).partition("\n")[0]
        raise ConfigError(f"model.device: the transformers engine cannot run on {device}: {first}") from error


def load_weights(model: Any, directory: Path) -> None:
    """Copy *.safetensors of `directory` into `model`. ValueError unless names and shapes are exactly the model's;
    weights that are tied to others may be left out. OSError: no such file.
    """
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")) or [directory / "model.safetensors"]:
        found |= load_file(path)
    own, with_tied = dict(model.named_parameters()), dict(model.named_parameters(remove_duplicate=False))
    wrong = sorted((own.keys() - found.keys()) | (found.keys() - with_tied.keys()))
    wrong += [name for name in found.keys() & own.keys() if found[name].shape != own[name].shape]
    if wrong:
        raise ValueError(f"{directory}: missing, unknown or of another shape: {', '.join(wrong[:4])}")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])
