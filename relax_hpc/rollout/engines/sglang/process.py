"""An SGLang server as a child process of a role."""

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
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relax_hpc.base.cuda_allocator import without_expandable_segments
from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.base.last_error import is_temporary, read_last_error, read_last_line
from relax_hpc.base.local_dir import Scratch, compile_caches
from relax_hpc.base.orphaned_memory import sweep_orphaned_memory
from relax_hpc.net.rendezvous.process import PARENT, clean_environment
from relax_hpc.rollout.engines.engine import EngineFault
from relax_hpc.rollout.engines.sglang.phases import Phases
from relax_hpc.rollout.engines.sglang.session import ProcessSession
from relax_hpc.rollout.engines.sglang.toolchain import toolkit_variables

_SERVER = "relax_hpc.rollout.engines.sglang.server"
_POLL_S = 0.1
_BACKLOG = 2048
"""Connections that may wait to be accepted, as uvicorn's default."""
_ARGUMENT_FILES = frozenset(("server_args.py", "validation_hook.py"))
"""Files in which SGLang 0.5.21 checks its server arguments. Their errors recur at each start."""
START_FLOOR_S = 300.0
"""Seconds for imports and compilation, before and after weights are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings that a server is started with."""

    arguments: dict[str, Any]
    """Server arguments by name, including `host` and `port` (0: a free one), without the key."""
    name: str
    """Prefix of the names of its log and of its launch file."""
    logs: Path
    threads: int
    stop_s: float
    """Seconds between the interrupt and the kill at its end."""
    routes_as_drawn: bool = False
    """See `first_routes`."""
    takes_media: bool = False
    """Whether prompts may have media, which the server reads from their store."""
    flags: str = "rollout.engine.flags"
    """Configuration key of the arguments that the user sets."""


class ServerProcess:
    """A server in a new session. It ends with this process and with `close`.

    No other process can take its port: this process opens the listening socket before the server
    starts, and keeps it open as long as requests are sent. The key is created for this server only.
    """

    session: ProcessSession
    scratch: Scratch
    listening: socket.socket
    key_file: Path
    key: str
    """Secret of requests to the server. `start` sets it and the attributes above."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.arguments = launch, dict(launch.arguments)
        self.log = launch.logs / f"{launch.name}.log"
        self._open = contextlib.AsyncExitStack()
        self._phases: Phases | None = None
        self._registered: set[Path] = set()
        self._log_start = 0
        """Bytes in the log before the start, from a server that this one replaces."""

    @property
    def phase(self) -> str:
        """See `Engine.phase`."""
        return self._phases.now() if self._phases else ""

    @property
    def url(self) -> str:
        """Address of the server, once it is started."""
        return f"http://{self.arguments['host']}:{self.arguments['port']}"

    async def start(self) -> None:
        """Start the process, which does not serve yet. The caller must call `close` in any case.
        EngineFault, ConfigError: see `listen`."""
        self.listening = self._open.enter_context(
            listen(self.arguments["host"], self.arguments["port"])
        )
        self.arguments["port"] = self.listening.getsockname()[1]
        self.scratch = self._open.enter_context(Scratch())
        self.key = secrets.token_hex(32)
        self.key_file = self.scratch.write("key", self.key)
        await self._launch()

    async def wait_healthy(self, healthy: Callable[[], Awaitable[bool]], limit_s: float) -> None:
        """Return when the server is ``healthy``. From then on, the end of one of its processes ends
        all of them. ConfigError, EngineFault: the server did not start."""
        try:
            async with asyncio.timeout(limit_s):
                while not await healthy():
                    if await self.ended(_POLL_S):
                        self._raise_start_failure()
        except TimeoutError as error:
            text = f"not healthy in start_timeout_s = {limit_s:g}{self.quoted_error()}"
            raise EngineFault("dead", f"{text}; see {self.log}") from error
        self.session.watch_children()
        self.register_shared_memory()

    async def ended(self, within_s: float) -> bool:
        """Whether the server has ended, or ends within ``within_s``."""
        await asyncio.wait([self.session.ended], timeout=within_s)
        return self.session.ended.done()

    async def close(self) -> None:
        """End all processes of the server and remove its files. May be called twice."""
        await self._open.aclose()

    def register_shared_memory(self) -> None:
        """Register the server's shared memory, so that it is removed together with the scratch
        directory."""
        # The registration is a file. A full disk must not prevent `close`.
        with contextlib.suppress(OSError):
            for path in self.session.shared_memory() - self._registered:
                self.scratch.remove_on_close(path)
                self._registered.add(path)

    async def _launch(self) -> None:
        # A role that was killed with its server could not clean up after it.
        sweep_orphaned_memory()
        launch, socket_number = self.launch, self.listening.fileno()
        launch.logs.mkdir(parents=True, exist_ok=True)
        settings = {
            "server": self.arguments,
            "key_file": str(self.key_file),
            "socket": socket_number,
            "routes_as_drawn": launch.routes_as_drawn,
            "flags": launch.flags,
            "takes_media": launch.takes_media,
        }
        file = launch.logs / f"{launch.name}.json"
        file.write_text(json.dumps(settings, indent=2) + "\n")
        command = (sys.executable, "-m", _SERVER, str(file))
        environment = server_environment(launch.threads, self.scratch.path)
        if self.arguments.get("enable_memory_saver"):
            environment |= _allocator_for_memory_saver(environment, launch.name)
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._phases = Phases(self.log)
            leader = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                pass_fds=(socket_number,),
                start_new_session=True,
            )
        self.session = ProcessSession(leader)
        self.session.ended.add_done_callback(lambda _: self._reject_connections())
        # A server that dies during its start leaves shared memory that `register_shared_memory` has
        # not seen. The exit stack calls this last.
        self._open.callback(sweep_orphaned_memory)
        # SIGINT and not SIGTERM: after a SIGTERM, SGLang 0.5.21 waits 5 s for running requests. No
        # caller waits for them here.
        interrupt = functools.partial(leader.send_signal, signal.SIGINT)
        self._open.push_async_callback(self.session.end, interrupt, launch.stop_s)
        # Also needed if the server is closed before it has started.
        self._open.callback(self.register_shared_memory)

    def _reject_connections(self) -> None:
        """Close new connections to a server that has ended.

        The socket stays open until `close`. If a process of another user took the port, it would
        get the key with the next request.
        """
        if self.listening.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        self.listening.setblocking(False)
        loop.add_reader(self.listening, self._close_pending)
        self._open.callback(loop.remove_reader, self.listening.fileno())
        self._close_pending()

    def _close_pending(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.listening.accept()[0].close()

    def _raise_start_failure(self) -> None:
        last_line = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
        if self.session.ended.result().endswith(f"code {EXIT_CONFIG}"):
            raise ConfigError(last_line)
        error = read_last_error(self.log, self._log_start)
        if _ARGUMENT_FILES.intersection(Path(file).name for file in error.files):
            text = f"{self.launch.flags}: SGLang refuses them: {error.text}"
            raise ConfigError(f"{text}; see {self.log}")
        ended = f"{self.session.ended.result()} while starting{self.quoted_error()}"
        fault = EngineFault("dead", f"{ended}; see {self.log}")
        fault.start_error = self.lasting_error()
        raise fault

    def lasting_error(self) -> str:
        """The last error in its log, unless it may be temporary. Empty: there is none."""
        text = read_last_error(self.log, self._log_start).text
        return "" if is_temporary(text) else text

    def quoted_error(self) -> str:
        """The last error in its log, after a colon; without an error, the last line."""
        text = read_last_error(self.log, self._log_start).text
        if text:
            return f": {text}"
        line = read_last_line(self.log, self._log_start)
        return f"; its log ends with {line!r}" if line else ""


def server_environment(threads: int, scratch: Path) -> dict[str, str]:
    """Environment of a server: that of this process without the variables of a launcher about
    ranks, because the server is not one of the ranks.

    ``scratch`` is the folder of its temporary files. They include sockets over which SGLang 0.5.21
    exchanges pickles, so the folder must be private. Compiled kernels go to a cache of the user.
    """
    variables = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
        # SGLang 0.5.21 caches the outputs of vision and audio towers, also across updates of the
        # weights and flushes of its cache. Size 0 turns this off.
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
    }
    inherited = clean_environment()
    return {
        **inherited,
        **toolkit_variables(inherited),
        **compile_caches(),
        **variables,
        "TMPDIR": str(scratch),
    }


def _allocator_for_memory_saver(environment: dict[str, str], server: str) -> dict[str, str]:
    """Changed allocator variables of ``environment`` for a ``server`` with enable_memory_saver."""
    # The memory saver of SGLang 0.5.21 does not work with expandable segments of torch's allocator.
    changed = without_expandable_segments(environment)
    for name in changed:
        print(
            f"{server}: {name}={environment[name]}: without expandable_segments, which SGLang's "
            "memory saver does not support (enable_memory_saver); other processes keep it",
            flush=True,
        )
    return changed


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on `port` (0: a free one) of `host`. EngineFault: the port is in use,
    perhaps by a server that is about to end. ConfigError: this process may not listen there.
    """
    # create_server also calls listen(). A bound socket that does not listen could be taken over by
    # any user of the node who sets SO_REUSEADDR.
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"rollout.engine.port: cannot listen on {port}: {error}") from error
        text = f"rollout.engine.port: {port} is in use on this node; choose another, or 0"
        raise EngineFault("dead", text) from error
