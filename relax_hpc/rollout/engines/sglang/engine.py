"""The engine of rollout by SGLang: requests to a server of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.server_devices import first_device
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.affinity import numa_of_gpus
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.queue.storage.media import placeholders_of
from relax_hpc.rollout.engines.engine import EngineFault, GenerateRequest, Generation, require_model
from relax_hpc.rollout.engines.sglang.client import SglangClient
from relax_hpc.rollout.engines.sglang.flags import ROUTES_FLAG, refuse_own, routes_misfit
from relax_hpc.rollout.engines.sglang.process import START_FLOOR_S, Launch, ServerProcess
from relax_hpc.tasks import environment_of
from relax_hpc.training.models.families import route_shape_of_model

_EXIT_GRACE_S = 1.0
_TOLD_TOKENS = 64
"""Tokens of a response between two pieces that the server sends."""
_HEARD_TOKENS = 256
"""Tokens of a response between two pieces where nobody needs unfinished ones: a piece is a sign of
life then, and 120 s of silence is far below what any engine draws."""
_CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # Without max_total_tokens SGLang takes most of the memory for keys and values. It does not
    # start if other processes take more than mem_fraction_static of the memory while it loads
    # weights (seen with 0.1 in SGLang 0.5.21).
    "mem_fraction_static": 0.4,
    "max_total_tokens": 16384,
    # Overlapping the scheduler with the model needs a device beside the CPU; here it costs a third
    # (measured).
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
}


class SglangEngine:
    """`Engine` by a `ServerProcess`."""

    name = "sglang"

    def __init__(
        self,
        config: Config,
        replica: int,
        model_dir: Path,
        version: Version,
        log_dir: Path,
        place: int | None = None,
    ) -> None:
        self._config, self._settings = config, config.rollout.engine
        self._model_dir, self._version = model_dir, version
        self.server = ServerProcess(
            Launch(
                arguments=server_arguments(config, replica, model_dir, version, place),
                name=f"engine-{replica}",
                logs=log_dir,
                threads=config.threads,
                stop_s=config.liveness.stop_timeout_s,
                routes_as_drawn=config.rollout.save_partial == "tokens",
                takes_media=bool(placeholders_of(model_dir)),
            )
        )
        self._open = contextlib.AsyncExitStack()

    @property
    def phase(self) -> str:
        """See `Engine.phase`."""
        return self.server.phase

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        self._routes = route_shape_of_model(self._model_dir, self._config.model)
        if self._routes and (misfit := routes_misfit()):
            raise ConfigError(misfit)
        self._open.push_async_callback(self.server.close)
        try:
            await self.server.start()
            shape = self._config.rollout
            together = shape.groups_per_request * self._config.samples_per_prompt
            about = shape.partial_rollout, together, self._routes, placeholders_of(self._model_dir)
            self._client = SglangClient(
                self.server.url, self.server.key, self._settings, self._version, *about
            )
            self._open.push_async_callback(self._client.close)
            limit_s = self._settings.start_timeout_s or START_FLOOR_S + read_seconds(
                self._model_dir
            )
            await self.server.wait_healthy(self._client.healthy, limit_s)
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        async with self._name_the_dead():
            return await self._client.generate(request)

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`."""
        async with self._name_the_dead():
            await self._client.update_weights(directory, version)
        # What it has taken since it started, too.
        await asyncio.to_thread(self.server.remember_memory)

    async def release(self) -> None:
        """See `Engine.release`."""
        async with self._name_the_dead():
            await self._client.release()

    @property
    def pause_s(self) -> float:
        """See `Engine.pause_s`."""
        return self._client.pause_s

    async def wait_dead(self) -> str:
        """See `Engine.wait_dead`."""
        ended = await asyncio.shield(self.server.session.ended)
        return f"{ended}{self.server.quoted_error()}"

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._open.aclose()

    @contextlib.asynccontextmanager
    async def _name_the_dead(self) -> AsyncIterator[None]:
        """Turn the faults that a dead server causes into "dead"; its sockets close just before it
        has ended.

        Of a server that has ended nothing is asked, and nothing believed: its port may be somebody
        else's.
        """
        fault: EngineFault | None = None
        ended = self.server.session.ended
        if not ended.done():
            try:
                yield
            except EngineFault as error:
                fault = error
                if not await self.server.ended(_EXIT_GRACE_S):
                    raise
        if ended.done():
            why = f" ({fault})" if fault else ""
            text = f"{ended.result()}{why}{self.server.quoted_error()}"
            raise EngineFault("dead", f"{text}; see {self.server.log}") from fault


def server_arguments(
    config: Config, replica: int, model_dir: Path, version: Version, place: int | None = None
) -> dict[str, Any]:
    """ServerArgs fields of a replica, without the key; the user's flags win. Port 0 stands for a
    free one.

    `place` as in `make_engine`. ConfigError if a flag names what the engine itself must set.
    """
    settings, flags = config.rollout.engine, config.rollout.engine.flags
    refuse_own(flags)
    return {
        "host": LOOPBACK,
        "port": settings.port + replica if settings.port else 0,
        "model_path": str(model_dir),
        "weight_version": str(version),
        "dtype": settings.dtype or config.model.dtype,
        "random_seed": config.seed + replica,
        "disable_radix_cache": not reads_again(config),
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "stream_interval": _TOLD_TOKENS
        if config.rollout.save_partial == "tokens"
        else _HEARD_TOKENS,
        **({ROUTES_FLAG: True} if config.model.routing_replay != "off" else {}),
        **(
            {"enable_memory_saver": True}
            if config.colocate and config.model.device == "cuda"
            else {}
        ),
        **with_devices(config, replica if place is None else place, flags),
    }


def reads_again(config: Config) -> bool:
    """Whether an engine has use for keys and values of what it has read: turns go on from those
    before. Prompts do not recur within a version, and of another one nothing may be used;
    retracted, SGLang 0.5.21 would use older ones."""
    return bool(environment_of(config)) and config.rollout.partial_rollout != "recompute"


def judge_arguments(config: Config, replica: int, host: str, place: int) -> dict[str, Any]:
    """The same of a server of the role genrm, which listens at ``host``."""
    settings = config.genrm
    refuse_own(settings.flags, "genrm.flags")
    return {
        "host": host,
        "port": 0,
        "model_path": settings.path,
        "dtype": settings.dtype or config.model.dtype,
        "random_seed": config.seed + replica,
        "skip_server_warmup": True,
        **with_devices(config, place, settings.flags),
    }


def with_devices(config: Config, place: int, flags: dict[str, Any]) -> dict[str, Any]:
    """A server's ``flags``, and the arguments that give it its devices.

    ``place``: its number (from 0) among the servers of its node, which all have these flags.
    """
    if config.model.device == "cpu":
        return _CPU_ARGUMENTS | flags
    return _numa() | flags | {"base_gpu_id": first_device(flags, place)}


def _numa() -> dict[str, list[int]]:
    """The NUMA domain of each GPU, where all are known: SGLang binds its processes there, within
    what this one has."""
    found = numa_of_gpus()
    return {"numa_node": found} if found and min(found) >= 0 else {}
