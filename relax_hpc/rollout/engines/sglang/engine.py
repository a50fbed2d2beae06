"""The SGLang engine of rollout: an SGLang server as a child process, and requests to it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.model_sizes import read_seconds
from relax_hpc.base.server_devices import first_device
from relax_hpc.base.versions import Version
from relax_hpc.config.gpus import gpu_vendor
from relax_hpc.config.schema import Config, ProfileConfig
from relax_hpc.net.rendezvous.affinity import numa_of_gpus
from relax_hpc.net.rendezvous.network import LOOPBACK
from relax_hpc.queue.storage.media import read_placeholders
from relax_hpc.rollout.engines.engine import (
    EngineFault,
    GenerateRequest,
    Generation,
    PromptScores,
    require_model,
)
from relax_hpc.rollout.engines.sglang.client import SglangClient
from relax_hpc.rollout.engines.sglang.flags import (
    ROUTES_FLAG,
    refuse_reserved_flags,
    routes_misfit,
)
from relax_hpc.rollout.engines.sglang.process import START_FLOOR_S, Launch, ServerProcess
from relax_hpc.tasks import environment_name
from relax_hpc.training.models.families import route_shape_of_model

_EXIT_GRACE_S = 1.0
"""Seconds for a server whose connections have failed to end."""
SAVED_INTERVAL_TOKENS = 64
"""Tokens between two pieces of a response if unfinished responses are saved."""
SIGN_OF_LIFE_TOKENS = 256
"""Tokens between two pieces of a response otherwise. A piece then only shows that the server works;
every engine samples this number well within the timeout of 120 s."""
_CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # max_total_tokens limits the memory for keys and values. SGLang 0.5.21 also requires that the
    # weights, and all that other processes take while it loads them, are less than
    # mem_fraction_static of the memory that was available before (`_profile_available_bytes`). A
    # small share makes it fail on a node with other load although there is room.
    "mem_fraction_static": 0.95,
    "max_total_tokens": 16384,
    # The overlap of scheduler and model needs a device besides the CPU. On a CPU it costs SGLang
    # 0.5.21 a third of its speed (measured).
    "disable_overlap_schedule": True,
    # Without it, the idle scheduler of SGLang 0.5.21 polls, which takes 35 % of a core.
    "sleep_on_idle": True,
}


class SglangEngine:
    """`Engine` with a `ServerProcess`."""

    name = "sglang"

    def __init__(
        self,
        config: Config,
        replica: int,
        model_dir: Path,
        version: Version,
        log_dir: Path,
        local_number: int | None = None,
    ) -> None:
        self._config, self._settings = config, config.rollout.engine
        self._model_dir, self._version = model_dir, version
        self.server = ServerProcess(
            Launch(
                arguments=server_arguments(config, replica, model_dir, version, local_number),
                name=f"engine-{replica}",
                logs=log_dir,
                threads=config.threads,
                stop_s=config.liveness.stop_timeout_s,
                routes_as_drawn=config.rollout.save_partial == "tokens",
                takes_media=bool(read_placeholders(model_dir)),
            )
        )
        self._open = contextlib.AsyncExitStack()
        self._has_answered = False

    @property
    def start_error(self) -> str:
        """Error that ended the server before its first response; see `errors.find_start_error`. A
        kernel that is missing shows only when the model first runs. Empty: there is none, it may
        be temporary, or the server has answered."""
        return "" if self._has_answered else self.server.lasting_error()

    @property
    def phase(self) -> str:
        """See `Engine.phase`."""
        return self.server.phase

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        self._routes = route_shape_of_model(self._model_dir, self._config.model)
        if self._routes:
            misfit = routes_misfit()
            if misfit:
                raise ConfigError(misfit)
        self._open.push_async_callback(self.server.close)
        try:
            await self.server.start()
            rollout = self._config.rollout
            self._client = SglangClient(
                self.server.url,
                self.server.key,
                self._settings,
                self._version,
                rollout.partial_rollout,
                rollout.groups_per_request * self._config.samples_per_prompt,
                self._routes,
                read_placeholders(self._model_dir),
            )
            self._open.push_async_callback(self._client.close)
            limit_s = self._settings.start_timeout_s
            if not limit_s:
                limit_s = START_FLOOR_S + read_seconds(self._model_dir)
            await self.server.wait_healthy(self._client.healthy, limit_s)
        except BaseException:
            await self.close()
            raise

    async def generate(self, request: GenerateRequest) -> Generation:
        """See `Engine.generate`."""
        async with self._report_dead_server():
            generation = await self._client.generate(request)
        self._has_answered = True
        return generation

    async def score(self, prompts: Sequence[Sequence[int]]) -> PromptScores:
        """See `PromptScorer`."""
        async with self._report_dead_server():
            return await self._client.score(prompts)

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`."""
        async with self._report_dead_server():
            await self._client.update_weights(directory, version)
        # The server may have created more shared memory since its start.
        await asyncio.to_thread(self.server.register_shared_memory)

    async def release(self) -> None:
        """See `Engine.release`."""
        async with self._report_dead_server():
            await self._client.release()

    async def start_profile(self, folder: Path, name: str, profile: ProfileConfig) -> None:
        """See `ProfiledEngine`."""
        kinds = ["CPU"] if self._config.model.device == "cpu" else ["CPU", "GPU"]
        async with self._report_dead_server():
            await self._client.start_profile(folder, name, profile, kinds)

    async def stop_profile(self) -> None:
        """See `ProfiledEngine`."""
        async with self._report_dead_server():
            await self._client.stop_profile()

    @property
    def pause_s(self) -> float:
        """See `Engine.pause_s`."""
        return self._client.pause_s

    async def wait_dead(self) -> str:
        """See `Engine.wait_dead`."""
        description = await asyncio.shield(self.server.session.ended)
        return f"{description}{self.server.quoted_error()}"

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._open.aclose()

    @contextlib.asynccontextmanager
    async def _report_dead_server(self) -> AsyncIterator[None]:
        """Replace the faults of requests to a dead server by "dead". The server's sockets close
        just before its process ends, so the process gets a moment to end.

        Nothing is sent to a server that has ended, and no reply is accepted, because another
        process may have its port.
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
            cause = f" ({fault})" if fault else ""
            text = f"{ended.result()}{cause}{self.server.quoted_error()}"
            dead = EngineFault("dead", f"{text}; see {self.server.log}")
            dead.start_error = self.start_error
            raise dead from fault


def server_arguments(
    config: Config,
    replica: int,
    model_dir: Path,
    version: Version,
    local_number: int | None = None,
) -> dict[str, Any]:
    """ServerArgs fields of a replica, without the key; the user's flags win. Port 0 stands for a
    free port.

    `local_number` as in `make_engine`. ConfigError: a flag names an argument that the engine sets.
    """
    settings, flags = config.rollout.engine, config.rollout.engine.flags
    refuse_reserved_flags(flags)
    saves_tokens = config.rollout.save_partial == "tokens"
    arguments: dict[str, Any] = {
        "host": LOOPBACK,
        "port": settings.port + replica if settings.port else 0,
        "model_path": str(model_dir),
        "weight_version": str(version),
        "dtype": settings.dtype or config.model.dtype,
        "random_seed": config.seed + replica,
        "disable_radix_cache": not reuses_cache(config),
        "skip_server_warmup": True,
        # Without it, each piece of a stream from SGLang 0.5.21 repeats the whole response.
        "incremental_streaming_output": True,
        "stream_interval": SAVED_INTERVAL_TOKENS if saves_tokens else SIGN_OF_LIFE_TOKENS,
    }
    if config.model.routing_replay != "off":
        arguments[ROUTES_FLAG] = True
    if config.colocate and config.model.device == "cuda":
        # Without it, SGLang 0.5.21 accepts release_memory_occupation and releases nothing.
        arguments["enable_memory_saver"] = True
    if local_number is None:
        local_number = replica
    return arguments | add_devices(config, local_number, flags)


def reuses_cache(config: Config) -> bool:
    """Whether an engine can reuse keys and values of earlier requests.

    A turn of an episode continues the turns before it. Prompts do not recur within a version, and
    keys and values of another version must not be used.
    """
    # In pause mode retract, SGLang 0.5.21 would read keys and values of older weights again.
    return bool(environment_name(config)) and config.rollout.partial_rollout != "recompute"


def judge_arguments(config: Config, replica: int, host: str, local_number: int) -> dict[str, Any]:
    """ServerArgs fields of a server of the role genrm, which listens at ``host``."""
    settings = config.genrm
    refuse_reserved_flags(settings.flags, "genrm.flags")
    return {
        "host": host,
        "port": 0,
        "model_path": settings.path,
        "dtype": settings.dtype or config.model.dtype,
        "random_seed": config.seed + replica,
        "skip_server_warmup": True,
        **add_devices(config, local_number, settings.flags),
    }


def add_devices(config: Config, local_number: int, flags: dict[str, Any]) -> dict[str, Any]:
    """A server's ``flags``, and the arguments that select its devices.

    ``local_number``: its number (from 0) among the servers of its node, which all have these flags.
    """
    if config.model.device == "cpu":
        return _CPU_ARGUMENTS | flags
    return _numa_argument(config) | flags | {"base_gpu_id": first_device(flags, local_number)}


def _numa_argument(config: Config) -> dict[str, list[int]]:
    # SGLang 0.5.21 binds its processes to the NUMA domain of their GPU, within the CPUs that this
    # process may use. It needs the domains of all GPUs.
    domains = numa_of_gpus(gpu_vendor(config))
    return {"numa_node": domains} if domains and min(domains) >= 0 else {}
