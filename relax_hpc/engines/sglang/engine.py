"""An SGLang server as a child process of a rollout role."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import json
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from relax_hpc.config.schema import Config
from relax_hpc.engines.engine import EngineFault, GenerateRequest, Generation, require_model
from relax_hpc.engines.sglang.client import SglangClient
from relax_hpc.engines.sglang.flags import ROUTES_FLAG, refuse_own, routes_misfit
from relax_hpc.engines.sglang.phases import Phases
from relax_hpc.engines.sglang.session import Session
from relax_hpc.errors import EXIT_CONFIG, ConfigError
from relax_hpc.local_dir import Scratch, compile_caches
from relax_hpc.models.families import routes_of
from relax_hpc.models.sizes import read_seconds
from relax_hpc.rendezvous.affinity import numa_of_gpus
from relax_hpc.rendezvous.process import PARENT, clean_environment
from relax_hpc.versions import Version

_SERVER = "relax_hpc.engines.sglang.server"
_POLL_S = 0.1
_EXIT_GRACE_S = 1.0
_HOST = "127.0.0.1"
_BACKLOG = 2048
"""Connections that may wait to be accepted, as uvicorn's default."""
_START_FLOOR_S = 300.0
"""Seconds for imports and compilation, before and after weights are read."""
_TOLD_TOKENS = 64
"""Tokens of a response between two pieces that the server sends."""
_HEARD_TOKENS = 256
"""Tokens of a response between two pieces where nobody needs unfinished ones: a piece is a sign of life then, and 120 s
of silence is far below what any engine draws."""
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
    """`Engine` by a server process with its own session, which dies with this process and with `close`.

    Nobody else can take its port: the socket listens from the first moment, and stays open here for as long as requests
    are sent to it. Its key is made for this server alone.
    """

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
        self._arguments = server_arguments(config, replica, model_dir, version, place)
        self._log, self._launch_file = log_dir / f"engine-{replica}.log", log_dir / f"engine-{replica}.json"
        self._open = contextlib.AsyncExitStack()
        self._phases: Phases | None = None
        self._remembered: set[Path] = set()

    @property
    def phase(self) -> str:
        """See `Engine.phase`."""
        return self._phases.now() if self._phases else ""

    async def start(self) -> None:
        """See `Engine.start`."""
        require_model(self._model_dir)
        self._routes = routes_of(self._model_dir, self._config.model)
        if self._routes and (misfit := routes_misfit()):
            raise ConfigError(misfit)
        try:
            self._listening = self._open.enter_context(listen(self._arguments["port"]))
            self._arguments["port"] = port = self._listening.getsockname()[1]
            self._scratch = self._open.enter_context(Scratch())
            self._key_file = self._scratch.write("key", key := secrets.token_hex(32))
            await self._launch()
            url, shape = f"http://{_HOST}:{port}", self._config.rollout
            together = shape.groups_per_request * self._config.samples_per_prompt
            about = shape.partial_rollout, together, self._routes
            self._client = SglangClient(url, key, self._settings, self._version, *about)
            self._open.push_async_callback(self._client.close)
            await self._wait_healthy()
            self._session.watch_parts()
            self._remember_memory()
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
        await asyncio.to_thread(self._remember_memory)

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
        return await asyncio.shield(self._session.ended)

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._open.aclose()

    async def _launch(self) -> None:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        socket_number = self._listening.fileno()
        launch = {"server": self._arguments, "key_file": str(self._key_file), "socket": socket_number}
        launch["routes_as_drawn"] = self._config.rollout.save_partial == "tokens"
        self._launch_file.write_text(json.dumps(launch, indent=2) + "\n")
        command = (sys.executable, "-m", _SERVER, str(self._launch_file))
        with self._log.open("ab") as log:
            self._phases = Phases(self._log)
            leader = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=server_environment(self._config.threads, self._scratch.path),
                pass_fds=(socket_number,),
                start_new_session=True,
            )
        self._session = Session(leader)
        # Who waits to be let in is turned away, and not kept waiting by the socket here.
        self._session.ended.add_done_callback(lambda _: self._listening.close())
        # SGLang waits 5 s after a TERM, to finish requests that nobody waits for here, and not after an interrupt.
        interrupt = functools.partial(leader.send_signal, signal.SIGINT)
        self._open.push_async_callback(self._session.end, interrupt, self._config.liveness.stop_timeout_s)
        # Of one that is closed before it has started, too.
        self._open.callback(self._remember_memory)

    def _remember_memory(self) -> None:
        """Have what the server would leave in memory go with its scratch."""
        # A full disk must not keep it from being closed.
        with contextlib.suppress(OSError):
            for path in self._session.shared_memory() - self._remembered:
                self._scratch.outside(path)
                self._remembered.add(path)

    async def _wait_healthy(self) -> None:
        limit = self._settings.start_timeout_s or _START_FLOOR_S + read_seconds(self._model_dir)
        try:
            async with asyncio.timeout(limit):
                while not await self._client.healthy():
                    if await self._ended(_POLL_S):
                        self._raise_start_failure()
        except TimeoutError as error:
            raise EngineFault("dead", f"not healthy in start_timeout_s = {limit}; see {self._log}") from error

    def _raise_start_failure(self) -> None:
        last = self._log.read_text(errors="replace").strip().rpartition("\n")[2]
        if self._session.ended.result().endswith(f"code {EXIT_CONFIG}"):
            raise ConfigError(last)
        raise EngineFault("dead", f"{self._session.ended.result()} while starting; see {self._log}")

    async def _ended(self, within_s: float) -> bool:
        await asyncio.wait([self._session.ended], timeout=within_s)
        return self._session.ended.done()

    @contextlib.asynccontextmanager
    async def _name_the_dead(self) -> AsyncIterator[None]:
        """Turn the faults that a dead server causes into "dead"; its sockets close just before it has ended.

        Of a server that has ended nothing is asked, and nothing believed: its port may be somebody else's.
        """
        fault: EngineFault | None = None
        if not self._session.ended.done():
            try:
                yield
            except EngineFault as error:
                fault = error
                if not await self._ended(_EXIT_GRACE_S):
                    raise
        if self._session.ended.done():
            why = f" ({fault})" if fault else ""
            raise EngineFault("dead", f"{self._session.ended.result()}{why}; see {self._log}") from fault


def server_arguments(
    config: Config, replica: int, model_dir: Path, version: Version, place: int | None = None
) -> dict[str, Any]:
    """ServerArgs fields of a replica, without the key; the user's flags win. Port 0 stands for a free one.

    `place` as in `make_engine`. ConfigError if a flag names what the engine itself must set.
    """
    settings, flags = config.rollout.engine, config.rollout.engine.flags
    refuse_own(flags)
    devices = flags.get("tp_size", 1) * flags.get("pp_size", 1)
    first_gpu = (replica if place is None else place) * devices
    return {
        "host": _HOST,
        "port": settings.port + replica if settings.port else 0,
        "model_path": str(model_dir),
        "weight_version": str(version),
        "dtype": settings.dtype or config.model.dtype,
        "random_seed": config.seed + replica,
        # Prompts do not recur within a version, and of another one nothing may be used.
        "disable_radix_cache": True,
        "skip_server_warmup": True,
        "incremental_streaming_output": True,
        "stream_interval": _TOLD_TOKENS if config.rollout.save_partial == "tokens" else _HEARD_TOKENS,
        **({ROUTES_FLAG: True} if config.model.routing_replay != "off" else {}),
        **({"enable_memory_saver": True} if config.colocate and config.model.device == "cuda" else {}),
        **(_CPU_ARGUMENTS if config.model.device == "cpu" else {"base_gpu_id": first_gpu} | _numa()),
        **flags,
    }


def _numa() -> dict[str, list[int]]:
    """The NUMA domain of each GPU, where all are known: SGLang binds its processes there, within what this one has."""
    found = numa_of_gpus()
    return {"numa_node": found} if found and min(found) >= 0 else {}


def server_environment(threads: int, scratch: Path) -> dict[str, str]:
    """Environment of this process without what a launcher said about its ranks: the server is not one of them.

    ``scratch`` gets its temporary files, among them sockets on which it unpickles what comes. What it compiles others
    of this user find again.
    """
    own = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", PARENT: str(os.getpid())}
    return clean_environment() | compile_caches() | own | {"TMPDIR": str(scratch)}


def listen(port: int) -> socket.socket:
    """A socket that listens on `port` (0: a free one). ConfigError if the port is taken.

    One that is bound and does not listen could be taken over by any user of the node, who only has to set SO_REUSEADDR.
    """
    try:
        return socket.create_server((_HOST, port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"rollout.engine.port: cannot listen on {port}: {error}") from error
        raise ConfigError(f"rollout.engine.port: {port} is in use; choose another, or 0") from error
