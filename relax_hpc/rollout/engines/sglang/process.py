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
from relax_hpc.rollout.engines.sglang.session import Session
from relax_hpc.rollout.engines.sglang.toolchain import toolkit_variables

_SERVER = "relax_hpc.rollout.engines.sglang.server"
_POLL_S = 0.1
_BACKLOG = 2048
"""Connections that may wait to be accepted, as uvicorn's default."""
_SETTINGS = frozenset(("server_args.py", "validation_hook.py"))
"""Files in which SGLang 0.5.21 judges its server arguments: each start has the same errors."""
START_FLOOR_S = 300.0
"""Seconds for imports and compilation, before and after weights are read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Settings that a server is started with."""

    arguments: dict[str, Any]
    """Server arguments by name, `host` and `port` among them (0: a free one), without the key."""
    name: str
    """Beginning of the names of its log and of its launch file."""
    logs: Path
    threads: int
    stop_s: float
    """Seconds between asking it to end and killing it."""
    routes_as_drawn: bool = False
    """See `first_routes`."""
    takes_media: bool = False
    """Whether prompts may have media, which it reads from their store."""
    flags: str = "rollout.engine.flags"
    """Key of the configuration that users' arguments come from."""


class ServerProcess:
    """A server with its own session, which dies with this process and with `close`.

    Nobody else can take its port: the socket listens from the first moment, and stays open here for
    as long as requests are sent to it. Its key is made for this server alone.
    """

    session: Session
    scratch: Scratch
    listening: socket.socket
    key_file: Path
    key: str
    """Secret that requests to it show. Set, like those above, by `start`."""

    def __init__(self, launch: Launch) -> None:
        self.launch, self.arguments = launch, dict(launch.arguments)
        self.log = launch.logs / f"{launch.name}.log"
        self._open = contextlib.AsyncExitStack()
        self._phases: Phases | None = None
        self._remembered: set[Path] = set()
        self._log_start = 0
        """Bytes that the log had before: of a server that this one replaces."""

    @property
    def phase(self) -> str:
        """See `Engine.phase`."""
        return self._phases.now() if self._phases else ""

    @property
    def url(self) -> str:
        """Address of the server, once it is started."""
        return f"http://{self.arguments['host']}:{self.arguments['port']}"

    async def start(self) -> None:
        """Start the process, which does not serve yet; `close` follows in any case. EngineFault,
        ConfigError: see `listen`."""
        self.listening = self._open.enter_context(
            listen(self.arguments["host"], self.arguments["port"])
        )
        self.arguments["port"] = self.listening.getsockname()[1]
        self.scratch = self._open.enter_context(Scratch())
        self.key = secrets.token_hex(32)
        self.key_file = self.scratch.write("key", self.key)
        await self._launch()

    async def wait_healthy(self, healthy: Callable[[], Awaitable[bool]], limit_s: float) -> None:
        """Return once it is ``healthy``; from then on it ends as a whole. ConfigError, EngineFault:
        it is not to be."""
        try:
            async with asyncio.timeout(limit_s):
                while not await healthy():
                    if await self.ended(_POLL_S):
                        self._raise_start_failure()
        except TimeoutError as error:
            text = f"not healthy in start_timeout_s = {limit_s:g}{self.quoted_error()}"
            raise EngineFault("dead", f"{text}; see {self.log}") from error
        self.session.watch_parts()
        self.remember_memory()

    async def ended(self, within_s: float) -> bool:
        """Whether it has ended, or does so within some seconds."""
        await asyncio.wait([self.session.ended], timeout=within_s)
        return self.session.ended.done()

    async def close(self) -> None:
        """End it and all that it has started, and remove what it leaves. Safe to call twice."""
        await self._open.aclose()

    def remember_memory(self) -> None:
        """Have what the server would leave in memory go with its scratch."""
        # A full disk must not keep it from being closed.
        with contextlib.suppress(OSError):
            for path in self.session.shared_memory() - self._remembered:
                self.scratch.remove_on_close(path)
                self._remembered.add(path)

    async def _launch(self) -> None:
        launch, socket_number = self.launch, self.listening.fileno()
        launch.logs.mkdir(parents=True, exist_ok=True)
        about = {"server": self.arguments, "key_file": str(self.key_file), "socket": socket_number}
        about |= {
            "routes_as_drawn": launch.routes_as_drawn,
            "flags": launch.flags,
            "takes_media": launch.takes_media,
        }
        file = launch.logs / f"{launch.name}.json"
        file.write_text(json.dumps(about, indent=2) + "\n")
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
        self.session = Session(leader)
        self.session.ended.add_done_callback(lambda _: self._turn_away())
        # A server that dies while it starts leaves shared memory that `remember_memory` did not
        # see. Called last.
        self._open.callback(sweep_orphaned_memory)
        # SGLang waits 5 s after a TERM, to finish requests that nobody waits for here, and not
        # after an interrupt.
        interrupt = functools.partial(leader.send_signal, signal.SIGINT)
        self._open.push_async_callback(self.session.end, interrupt, launch.stop_s)
        # Of one that is closed before it has started, too.
        self._open.callback(self.remember_memory)

    def _turn_away(self) -> None:
        """Close new connections to a server that has ended.

        The socket stays open until `close`: a process of another user that took the port would get
        the key with the next request.
        """
        if self.listening.fileno() < 0:
            return
        loop = asyncio.get_running_loop()
        self.listening.setblocking(False)
        loop.add_reader(self.listening, self._close_next)
        self._open.callback(loop.remove_reader, self.listening.fileno())
        self._close_next()

    def _close_next(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self.listening.accept()[0].close()

    def _raise_start_failure(self) -> None:
        last = self.log.read_text(errors="replace").strip().rpartition("\n")[2]
        if self.session.ended.result().endswith(f"code {EXIT_CONFIG}"):
            raise ConfigError(last)
        error = read_last_error(self.log, self._log_start)
        if _SETTINGS.intersection(Path(file).name for file in error.files):
            text = f"{self.launch.flags}: SGLang refuses them: {error.text}"
            raise ConfigError(f"{text}; see {self.log}")
        ended = f"{self.session.ended.result()} while starting{self.quoted_error()}"
        fault = EngineFault("dead", f"{ended}; see {self.log}")
        fault.start_error = "" if is_temporary(error.text) else error.text
        raise fault

    def quoted_error(self) -> str:
        """The last error in its log, behind a colon; without one, the last line."""
        if text := read_last_error(self.log, self._log_start).text:
            return f": {text}"
        line = read_last_line(self.log, self._log_start)
        return f"; its log ends with {line!r}" if line else ""


def server_environment(threads: int, scratch: Path) -> dict[str, str]:
    """Environment of this process without what a launcher said about its ranks: the server is not
    one of them.

    ``scratch`` gets its temporary files, among them sockets on which it unpickles what comes. What
    it compiles others of this user find again.
    """
    own = {
        "OMP_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        PARENT: str(os.getpid()),
    }
    # What a tower has made of media would outlive an update of its weights, and every flush.
    own["SGLANG_VLM_CACHE_SIZE_MB"] = "0"
    inherited = clean_environment()
    return (
        inherited | toolkit_variables(inherited) | compile_caches() | own | {"TMPDIR": str(scratch)}
    )


def _allocator_for_memory_saver(environment: dict[str, str], server: str) -> dict[str, str]:
    """The allocator's variables of ``environment`` that a ``server`` with enable_memory_saver needs
    otherwise."""
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
    maybe by a server that is about to end. ConfigError: this process may not listen there.

    One that is bound and does not listen could be taken over by any user of the node, who only has
    to set SO_REUSEADDR.
    """
    try:
        return socket.create_server((host, port), backlog=_BACKLOG)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise ConfigError(f"rollout.engine.port: cannot listen on {port}: {error}") from error
        text = f"rollout.engine.port: {port} is in use on this node; choose another, or 0"
        raise EngineFault("dead", text) from error
