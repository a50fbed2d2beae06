"""An SGLang server as a child process of a rollout role."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from relax_hpc.config.check import OWN_FLAGS, own_flag
from relax_hpc.config.schema import Config
from relax_hpc.errors import EXIT_CONFIG, ConfigError
from relax_hpc.rendezvous.process import PARENT, clean_environment
from relax_hpc.rollout.engine import EngineFault, GenerateRequest, Generation, Sampling, require_model
from relax_hpc.rollout.sglang_client import SglangClient
from relax_hpc.rollout.sglang_server import read_token
from relax_hpc.versions import Version

_SERVER = "relax_hpc.rollout.sglang_server"
_POLL_S = 0.1
_EXIT_GRACE_S = 1.0
_HOST = "127.0.0.1"
_TOLD_TOKENS = 64
"""Of a response between two pieces that the server tells of."""
_NEVER = 1 << 30
_CPU_ARGUMENTS = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    # Left alone, SGLang takes most of the memory for keys and values.
    "mem_fraction_static": 0.1,
    "max_total_tokens": 16384,
    # Overlapping the scheduler with the model needs a device beside the CPU; here it costs a third (measured).
    "disable_overlap_schedule": True,
    "sleep_on_idle": True,
}


class SglangEngine:
    """`Engine` by a server process with its own session, which dies with this process and with `close`."""

    name = "sglang"

    def __init__(
        self,
        config: Config,
        replica: int,
        model_dir: Path,
        version: Version,
        log_dir: Path,
        token_file: Path,
        place: int | None = None,
    ) -> None:
        self._config, self._settings = config, config.rollout.engine
        self._model_dir, self._version, self._token_file = model_dir, version, token_file
        self._arguments = server_arguments(config, replica, model_dir, version, place)
        self._log, self._launch_file = log_dir / f"engine-{replica}.log", log_dir / f"engine-{replica}.json"
        self._open = contextlib.AsyncExitStack()

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        token = read_token(self._token_file)
        reserved = self._open.enter_context(reserve_port(self._arguments["port"]))
        self._arguments["port"] = port = reserved.getsockname()[1]
        try:
            self._process = await self._launch()
            self._open.push_async_callback(end_session, self._process, self._config.liveness.stop_timeout_s)
            url, partial = f"http://{_HOST}:{port}", self._config.rollout.partial_rollout
            self._client = SglangClient(url, token, self._settings, self._version, partial)
            self._open.push_async_callback(self._client.close)
            await self._wait_healthy()
        except BaseException:
            await self.close()
            raise

    async def generate(self, requests: Sequence[GenerateRequest], sampling: Sampling) -> list[Generation | EngineFault]:
        """See `Engine.generate`."""
        async with self._name_the_dead():
            return await self._client.generate(requests, sampling)

    async def update_weights(self, directory: Path, version: Version) -> None:
        """See `Engine.update_weights`."""
        async with self._name_the_dead():
            await self._client.update_weights(directory, version)

    async def release(self) -> None:
        """See `Engine.release`."""
        async with self._name_the_dead():
            await self._client.release()

    @property
    def pause_s(self) -> float:
        """See `Engine.pause_s`."""
        return self._client.pause_s

    async def wait_dead(self) -> int:
        """See `Engine.wait_dead`; negative after a signal."""
        return await self._process.wait()

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._open.aclose()

    async def _launch(self) -> asyncio.subprocess.Process:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        launch = {"server": self._arguments, "token_file": str(self._token_file.resolve())}
        self._launch_file.write_text(json.dumps(launch, indent=2) + "\n")
        command = (sys.executable, "-m", _SERVER, str(self._launch_file))
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(self._config.threads),
                start_new_session=True,
            )

    async def _wait_healthy(self) -> None:
        limit = self._settings.start_timeout_s
        try:
            async with asyncio.timeout(limit):
                while not await self._client.healthy():
                    if await self._exited(_POLL_S):
                        self._raise_start_failure()
        except TimeoutError as error:
            raise EngineFault("dead", f"not healthy in start_timeout_s = {limit}; see {self._log}") from error

    def _raise_start_failure(self) -> None:
        code = self._process.returncode
        if code == EXIT_CONFIG:
            raise ConfigError(self._log.read_text(errors="replace").strip().rpartition("\n")[2])
        raise EngineFault("dead", f"the server ended with {code} while starting; see {self._log}")

    async def _exited(self, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._process.wait()
        return self._process.returncode is not None

    @contextlib.asynccontextmanager
    async def _name_the_dead(self) -> AsyncIterator[None]:
        """Turn the faults that a dead server causes into "dead"; its sockets close just before it has ended."""
        try:
            yield
        except EngineFault as fault:
            if not await self._exited(_EXIT_GRACE_S):
                raise
            raise EngineFault("dead", f"ended with {self._process.returncode} ({fault}); see {self._log}") from fault


def server_arguments(
    config: Config, replica: int, model_dir: Path, version: Version, place: int | None = None
) -> dict[str, Any]:
    """ServerArgs fields of a replica, without the token; the user's flags win. Port 0 stands for a free one.

    `place` as in `make_engine`. ConfigError if a flag names what the engine itself must set.
    """
    settings, flags = config.rollout.engine, config.rollout.engine.flags
    for name in flags:
        if name in OWN_FLAGS:
            raise ConfigError(f"rollout.engine.flags.{name}: not allowed; {own_flag(name)}")
    devices = flags.get("tp_size", 1) * flags.get("pp_size", 1)
    first_gpu = (replica if place is None else place) * devices
    return {
        "host": _HOST,
        "port": settings.port + replica if settings.port else 0,
        "model_path": str(model_dir),
        "weight_version": str(version),
        "dtype": config.model.dtype,
        "random_seed": config.seed + replica,
        # Prompts do not recur within a version, and an update flushes the cache.
        "disable_radix_cache": True,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "stream_interval": _TOLD_TOKENS if config.rollout.save_partial == "tokens" else _NEVER,
        **({"enable_memory_saver": True} if config.colocate and config.model.device == "cuda" else {}),
        **(_CPU_ARGUMENTS if config.model.device == "cpu" else {"base_gpu_id": first_gpu}),
        **flags,
    }


def server_environment(threads: int) -> dict[str, str]:
    """This process's environment without what a launcher said about its ranks: the server is not one of them."""
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
    return clean_environment() | own


def reserve_port(port: int) -> socket.socket:
    """A socket bound to `port` (0: a free one) that never listens: nobody else is given the port, but a server that
    sets SO_REUSEADDR, as uvicorn does, can still listen on it (Linux). ConfigError if the port is taken.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        reserved.bind((_HOST, port))
    except OSError as error:
        reserved.close()
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"rollout.engine.port: cannot listen on {port}: {error}") from error
        raise ConfigError(f"rollout.engine.port: {port} is in use; choose another, or 0") from error
    return reserved


async def end_session(leader: asyncio.subprocess.Process, grace_s: float) -> None:
    """End every process of the session that `leader` began; what is left after `grace_s` is killed."""
    members = _session(leader.pid)
    with contextlib.suppress(ProcessLookupError):
        # SGLang waits 5 s after a TERM, to finish requests that nobody waits for here, and not after an interrupt.
        leader.send_signal(signal.SIGINT)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(grace_s):
            await leader.wait()
    for process in _session(leader.pid):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    async with asyncio.timeout(grace_s):
        await leader.wait()
    # The event loop alone may reap the leader.
    await asyncio.to_thread(psutil.wait_procs, [one for one in members if one.pid != leader.pid], timeout=grace_s)


def _session(leader: int) -> list[psutil.Process]:
    def belongs(process: psutil.Process) -> bool:
        with contextlib.suppress(ProcessLookupError):
            return os.getsid(process.pid) == leader
        return False

    return [process for process in psutil.process_iter() if belongs(process)]
