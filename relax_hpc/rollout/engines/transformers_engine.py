"""A small engine in this process: slow, and on a CPU reproducible bit for bit whatever is generated
beside a sample."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.imports import many_imports
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.storage.media import placeholders_of
from relax_hpc.rollout.engines.deadline import Silence
from relax_hpc.rollout.engines.engine import (
    Draft,
    EngineFault,
    GenerateRequest,
    Generation,
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

_IMPORTING = threading.Lock()
_GIVE_UP_S = 1.0
"""Seconds for a thread to end whose response nobody waits for."""


class TransformersEngine:
    """`Engine` by Hugging Face's model, one sample at a time with its cache of keys and values."""

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
        place: int,
    ) -> None:
        """See `make_engine`."""
        self._device = f"cuda:{place}" if config.model.device == "cuda" else config.model.device
        self._dtype = config.rollout.engine.dtype or config.model.dtype
        self._silence = Silence(config.rollout.engine.request_timeout_s)
        self._model_dir, self._version = model_dir, version
        self._partial, self._ignored = config.rollout.partial_rollout, config.model.ignore_keys
        self._lock = threading.Lock()
        """Lock that is held while the weights are looked at or changed: for a token."""
        self._gate = UpdateGate()
        self._turn = asyncio.Lock()
        """Lock of the sample that is drawn: the others wait, in the order in which they came."""

    async def start(self) -> None:
        """See `Engine.start`. Sets this process's torch to one thread: sums then have one order."""
        require_model(self._model_dir)
        self._tokenizer = load_tokenizer(self._model_dir)
        self._placeholders = placeholders_of(self._model_dir)
        self._rules = Rules.of(self._model_dir) if self._placeholders else None
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
        drawing = _Drawing(request, asyncio.get_running_loop(), self._silence)
        await self._gate.enter()
        try:
            with self._silence.limited():
                async with self._turn:
                    return checked(await drawing.by(self._draw), request.budget)
        except TimeoutError as error:
            raise EngineFault("timeout", f"no token for {self._silence.seconds} s") from error
        except asyncio.CancelledError:
            await drawing.end()
            raise
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
        """Never returns: there is no process but this one."""
        return await asyncio.get_running_loop().create_future()

    async def close(self) -> None:
        """Nothing to end."""

    def _swap(self, directory: Path, version: Version) -> None:
        with self._lock:
            started = time.monotonic()
            move(self._model, self._device)
            load_weights(self._model, directory, self._spec)
            self._version, self.pause_s = version, time.monotonic() - started

    def _draw(self, drawing: _Drawing) -> Generation:
        import torch

        request, sampling = drawing.request, drawing.request.sampling
        stops = Stops.of(sampling, self._ends, self._tokenizer)
        draft = request.draft or Draft()
        drawn, cache, version, turn = Draft.of(draft.so_far()), None, 0, draft.turn
        model = getattr(self._model, "thinker", self._model)
        media, never = (
            MediaInputs(request.media, self._rules, model),
            [*self._placeholders.values()],
        )
        reason: Literal["stop", "length"] = "length"
        for position in range(len(drawn.token_ids), request.budget):
            with self._lock, torch.inference_mode():
                before, version = version, self._version.encode()
                if self._partial == "recompute" and version != before:
                    cache = None
                whole = [*request.prompt_ids, *drawn.token_ids]
                start = len(whole) - 1 if cache is not None else 0
                output = model(
                    **media.of(whole, start),
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
                logits = output.logits[0, -1]
                logits[never] = -torch.inf
            uniform = keyed_uniform(sampling.seed, request.prompt_id, request.sample, position)
            token, logprob = sample_token(logits, sampling, uniform)
            drawn.add([token], [logprob], [version])
            drawing.go_on()
            if stops.met(drawn.token_ids, turn):
                reason = "stop"
                break
            cache = output.past_key_values
            if position + 1 < request.budget:
                draft.add([token], [logprob], [version])
        draft.ended = replace(drawn.so_far(), finish_reason=reason)
        return draft.ended


class _GivenUp(Exception):
    """Signal that nobody waits for the response any more."""


class _Drawing:
    """A request while a thread works on it."""

    def __init__(
        self, request: GenerateRequest, loop: asyncio.AbstractEventLoop, silence: Silence
    ) -> None:
        self.request = request
        self._loop, self._silence = loop, silence
        self._given_up = threading.Event()
        self._thread: asyncio.Future[Generation] | None = None

    async def by(self, draw: Callable[[_Drawing], Generation]) -> Generation:
        """Return ``draw``'s generation, made in a thread; if nobody waits any more, it ends with
        its next token."""
        self._thread = asyncio.ensure_future(asyncio.to_thread(draw, self))
        try:
            return await asyncio.shield(self._thread)
        except asyncio.CancelledError:
            self._given_up.set()
            self._thread.add_done_callback(lambda ended: ended.exception())
            raise

    async def end(self) -> None:
        """Wait for its thread, if it has one."""
        if self._thread:
            await asyncio.wait([self._thread], timeout=_GIVE_UP_S)

    def go_on(self) -> None:
        """Note a token; called for each. _GivenUp: there need be no more."""
        self._loop.call_soon_threadsafe(self._silence.heard)
        if self._given_up.is_set():
            raise _GivenUp


def _build(directory: Path, dtype: str) -> tuple[Any, set[int]]:
    """The model of `directory` without its weights, and its end tokens."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    with many_imports():
        import torch

        torch.set_num_threads(1)
        install_transformers_hook()
        # Its modules load on first use, which two threads at once break.
        with _IMPORTING:
            from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMultimodalLM

        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        ends = config.get_text_config().eos_token_id
        # Of a model that speaks, what it thinks is asked for alone.
        config.enable_audio_output = False
        kind = AutoModelForMultimodalLM if placeholders_of(directory) else AutoModelForCausalLM
        model = kind.from_config(config, dtype=getattr(torch, dtype)).eval()
    return model, set(ends if isinstance(ends, list) else [ends]) - {None}


def move(model: Any, device: str) -> None:
    """Have ``model`` on ``device``. ConfigError: there is no such device here, or no room on it."""
    try:
        model.to(device)
    except (AssertionError, RuntimeError) as error:
        # Of a build without CUDA; of a GPU that is not there, or is full.
        first = str(error).partition("\n")[0]
        raise ConfigError(
            f"model.device: the transformers engine cannot run on {device}: {first}"
        ) from error


def load_weights(model: Any, directory: Path, spec: ModelSpec) -> None:
    """Copy *.safetensors of `directory` into `model`, which ``spec`` describes. ValueError unless
    names and shapes are exactly the model's; weights that are tied to others may be left out.
    OSError: no such file.
    """
    import torch
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(directory.glob("*.safetensors")) or [directory / "model.safetensors"]:
        found |= {
            name: tensor for name, tensor in load_file(path).items() if not spec.is_untrained(name)
        }
    try:
        found = as_in_transformers(spec, found)
    except KeyError as missing:
        raise ValueError(f"{directory}: missing: {missing}") from missing
    own, with_tied = (
        dict(model.named_parameters()),
        dict(model.named_parameters(remove_duplicate=False)),
    )
    wrong = sorted((own.keys() - found.keys()) | (found.keys() - with_tied.keys()))
    wrong += [name for name in found.keys() & own.keys() if found[name].shape != own[name].shape]
    if wrong:
        raise ValueError(
            f"{directory}: missing, unknown or of another shape: {', '.join(wrong[:4])}"
        )
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(found[name])
