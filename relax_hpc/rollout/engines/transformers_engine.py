"""A small engine in this process. It is slow. On a CPU its responses are reproducible bit for bit
and do not depend on its other requests."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.imports import fast_imports
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.rollout.engines.deadline import SilenceTimeout
from relax_hpc.rollout.engines.engine import (
    Draft,
    EngineFault,
    GenerateRequest,
    Generation,
    PromptScores,
    checked,
    require_model,
)
from relax_hpc.rollout.engines.media import check_places
from relax_hpc.rollout.engines.seeded_draws import keyed_uniform, sample_token
from relax_hpc.rollout.engines.stops import Stops
from relax_hpc.rollout.engines.transformers_media import MediaInputs
from relax_hpc.rollout.engines.update_gate import UpdateGate
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.models.stored_pieces import as_in_transformers

if TYPE_CHECKING:
    import torch

_IMPORT_LOCK = threading.Lock()
_ABORT_S = 1.0
"""Seconds for the thread of a cancelled request to end."""


class TransformersEngine:
    """`Engine` that runs a Hugging Face model, one sample at a time, with a cache of keys and
    values."""

    name = "transformers"
    phase = "transformers is loading weights"
    pause_s = 0.0

    def __init__(
        self,
        config: Config,
        number: int,
        model_dir: Path,
        version: Version,
        log_dir: Path,
        local_number: int,
    ) -> None:
        """See `make_engine`."""
        is_cuda = config.model.device == "cuda"
        self._device = f"cuda:{local_number}" if is_cuda else config.model.device
        self._dtype = config.rollout.engine.dtype or config.model.dtype
        self._silence = SilenceTimeout(config.rollout.engine.request_timeout_s)
        self._model_dir, self._version = model_dir, version
        self._partial, self._ignored = config.rollout.partial_rollout, config.model.ignore_keys
        self._weights_lock = threading.Lock()
        """Held while one token is computed, or while the weights are changed."""
        self._gate = UpdateGate()
        self._sample_lock = asyncio.Lock()
        """Held by the sample that is generated; the other samples wait in order of arrival."""

    async def start(self) -> None:
        """See `Engine.start`. Limits torch in this process to one thread, so that the order of
        additions in sums is fixed."""
        require_model(self._model_dir)
        self._tokenizer = load_tokenizer(self._model_dir)
        self._placeholders = read_placeholders(self._model_dir)
        self._rules = Rules.from_model(self._model_dir) if self._placeholders else None
        self._spec = spec_from_config(read_config(self._model_dir), self._ignored)
        self._model, self._ends = await asyncio.to_thread(_build, self._model_dir, self._dtype)
        try:
            await asyncio.to_thread(move, self._model, self._device)
            await asyncio.to_thread(load_weights, self._model, self._model_dir, self._spec)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model.path: {error}") from error

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        check_places(request, self._placeholders)
        generating = _ThreadRequest(request, asyncio.get_running_loop(), self._silence)
        await self._gate.enter()
        try:
            with self._silence.for_request():
                async with self._sample_lock:
                    return checked(await generating.run(self._generate), request.budget)
        except TimeoutError as error:
            raise EngineFault("timeout", f"no token for {self._silence.seconds} s") from error
        except asyncio.CancelledError:
            await generating.await_thread()
            raise
        finally:
            self._gate.leave()

    async def score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        """See `PromptScorer`."""
        await self._gate.enter()
        try:
            return await asyncio.to_thread(self._score, prompts)
        finally:
            self._gate.leave()

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`."""
        try:
            async with self._gate.update(when_empty=self._partial == "off"):
                await asyncio.to_thread(self._swap, directory, version)
        except (OSError, ValueError) as error:
            raise EngineFault("update_failed", f"{version} from {directory}: {error}") from error

    async def release(self) -> None:
        """See `Engine.release`."""
        await asyncio.to_thread(move, self._model, "cpu")

    async def wait_dead(self) -> str:
        """Never return: the engine starts no process."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Do nothing: the engine starts no process."""

    def _swap(self, directory: Path, version: Version) -> None:
        with self._weights_lock:
            started = time.monotonic()
            move(self._model, self._device)
            load_weights(self._model, directory, self._spec)
            self._version, self.pause_s = version, time.monotonic() - started

    def _score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        import torch

        logprobs = list[list[float]]()
        with self._weights_lock, torch.inference_mode():
            for prompt in prompts:
                ids = torch.tensor([list(prompt)], device=self._device)
                # [tokens - 1, vocabulary]
                logits = self._model(input_ids=ids).logits[0, :-1].float()
                chosen = logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0]
                logprobs.append(chosen.tolist())
            return PromptScores(self._version, logprobs)

    def _generate(self, generating: _ThreadRequest) -> Generation:
        request, sampling = generating.request, generating.request.sampling
        stops = Stops.from_sampling(sampling, self._ends, self._tokenizer)
        draft = request.draft or Draft()
        response, turn_start = draft.fresh_copy(), draft.turn_start
        model = getattr(self._model, "thinker", self._model)
        media = MediaInputs(request.media, self._rules, model)
        cache, version = None, 0
        reason: Literal["stop", "length"] = "length"
        for position in range(len(response.token_ids), request.budget):
            with self._weights_lock:
                previous_version, version = version, self._version.encode()
                if self._partial == "recompute" and version != previous_version:
                    cache = None
                context = [*request.prompt_ids, *response.token_ids]
                logits, cache = self._forward(model, media, context, cache)
            uniform = keyed_uniform(sampling.seed, request.prompt_id, request.sample, position)
            token, logprob = sample_token(logits, sampling, uniform)
            response.add([token], [logprob], [version])
            generating.note_token()
            if stops.met(response.token_ids, turn_start):
                reason = "stop"
                break
            if position + 1 < request.budget:
                draft.add([token], [logprob], [version])
        generation = replace(response.partial(), finish_reason=reason)
        draft.ended = generation
        return generation

    def _forward(
        self, model: Any, media: MediaInputs, context: list[int], cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """Logits [vocabulary] of the token after ``context``, and the new cache of keys and
        values."""
        import torch

        start = len(context) - 1 if cache is not None else 0
        with torch.inference_mode():
            output = model(
                **media.for_pass(context, start),
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[0, -1]
            # Placeholders of media are never sampled.
            logits[[*self._placeholders.values()]] = -torch.inf
        return logits, output.past_key_values


class _Aborted(Exception):
    """Signal to the thread of a cancelled request."""


class _ThreadRequest:
    """A request that a thread works on."""

    def __init__(
        self, request: GenerateRequest, loop: asyncio.AbstractEventLoop, silence: SilenceTimeout
    ) -> None:
        self.request = request
        self._loop, self._silence = loop, silence
        self._is_cancelled = threading.Event()
        self._thread: asyncio.Future[Generation] | None = None

    async def run(self, generate: Callable[[_ThreadRequest], Generation]) -> Generation:
        """Call ``generate`` in a thread. If this call is cancelled, the thread ends with its next
        token."""
        self._thread = asyncio.ensure_future(asyncio.to_thread(generate, self))
        try:
            return await asyncio.shield(self._thread)
        except asyncio.CancelledError:
            self._is_cancelled.set()
            # Retrieve the exception, because asyncio logs one that is never retrieved.
            self._thread.add_done_callback(lambda ended: ended.exception())
            raise

    async def await_thread(self) -> None:
        """Wait for the end of the thread, if it was started."""
        if self._thread:
            await asyncio.wait([self._thread], timeout=_ABORT_S)

    def note_token(self) -> None:
        """Record a token; called for each. _Aborted: the request was cancelled."""
        self._loop.call_soon_threadsafe(self._silence.note_output)
        if self._is_cancelled.is_set():
            raise _Aborted


def _build(directory: Path, dtype: str) -> tuple[Any, set[int]]:
    """The model of `directory` without its weights, and its end tokens."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    with fast_imports():
        import torch

        torch.set_num_threads(1)
        install_transformers_hook()
        # transformers loads its modules on first use, which fails if two threads do it together.
        with _IMPORT_LOCK:
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        ends = config.get_text_config().eos_token_id
        # A model with speech output is used without its talker.
        config.enable_audio_output = False
        kind = AutoModelForMultimodalLM if read_placeholders(directory) else AutoModelForCausalLM
        model = kind.from_config(config, dtype=getattr(torch, dtype)).eval()
    return model, set(ends if isinstance(ends, list) else [ends]) - {None}


def move(model: Any, device: str) -> None:
    """Move ``model`` to ``device``. ConfigError: the device does not exist or has too little
    memory."""
    try:
        model.to(device)
    except (AssertionError, RuntimeError) as error:
        # AssertionError: torch was built without CUDA. RuntimeError: no such GPU, or it is full.
        first_line = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.device: the transformers engine cannot run on {device}: {first_line}"
        ) from error


def load_weights(model: Any, directory: Path, spec: ModelSpec) -> None:
    """Copy *.safetensors of `directory` into `model`, which ``spec`` describes. ValueError unless
    names and shapes are exactly those of the model; tied weights may be absent. OSError: the file
    does not exist.
    """
    import torch
    from safetensors.torch import load_file

    tensors: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")) or [directory / "model.safetensors"]:
        for name, tensor in load_file(path).items():
            if not spec.is_untrained(name):
                tensors[name] = tensor
    try:
        tensors = as_in_transformers(spec, tensors)
    except KeyError as missing:
        raise ValueError(f"{directory}: missing: {missing}") from missing
    parameters = dict(model.named_parameters())
    with_tied = dict(model.named_parameters(remove_duplicate=False))
    wrong = sorted((parameters.keys() - tensors.keys()) | (tensors.keys() - with_tied.keys()))
    for name in tensors.keys() & parameters.keys():
        if tensors[name].shape != parameters[name].shape:
            wrong.append(name)
    if wrong:
        raise ValueError(
            f"{directory}: missing, unknown or of another shape: {', '.join(wrong[:4])}"
        )
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors[name])
