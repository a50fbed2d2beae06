"""NIXL, loaded so that its process can exit, and one agent of it: registered memory, peers, and
reads from them.

The package is optional. Its wheel crashes at exit where UCX has loaded the module for EFA cards,
which UCX_MODULES leaves out; whoever sets that variable to anything else should leave such a
process by `os._exit`, with its files flushed.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.net.transport.links import Deadline

_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
_ENVIRONMENT = {
    "UCX_MODULES": "cma,ib,ib_mlx5",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Variables for the libraries where they are not set. What goes wrong is raised; it need not be
printed too."""
_SPIN_S = 3e-4
_PAUSE_GROWS_S = 1e-6
_LONGEST_PAUSE_S = 1e-3
"""Seconds between two looks at a transfer, at most. It begins by spinning: most are over soon, and
no sleep is shorter than 50 us."""


def why_not_installed() -> str:
    """Instruction to install NIXL; empty if it is here. Nothing is loaded."""
    return "" if _package() else "there is no package nixl-cu12; pip install --no-deps nixl-cu12"


def _package() -> str | None:
    return next(filter(find_spec, _PACKAGES), None)


def knows_all_cards() -> bool:
    """Whether NIXL takes the system's drivers. Its wheel has a libibverbs of its own, which finds
    only its own."""
    package = _package()
    if package is None:
        return False
    own = Path(find_spec(package).origin).parent.with_name(f"{package}.libs").glob("libibverbs*")
    return all(path.is_symlink() for path in own)


def _load() -> Any:
    """Module with NIXL's classes; ImportError if there is none."""
    package = _package()
    if package is None:
        raise ImportError(why_not_installed())
    return import_module(f"{package}._api")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set our variables while the libraries read them, which they do once: processes started later
    do without."""
    ours = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            os.environ.pop(name, None)


def check_nixl() -> tuple[bool, str]:
    """Whether NIXL can be used in this process, and if not, why."""
    try:
        with _environment():
            _load()
    except (ImportError, OSError) as error:
        return False, str(error)
    return True, ""


def address_of(memory: memoryview) -> int:
    """Address at which ``memory`` begins in this process."""
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


class NixlAgent:
    """One NIXL agent, used by one thread at a time, without NIXL's own thread, which would keep a
    core busy.

    Its name is never used again, by this process or another. An exception of any kind if NIXL
    cannot start.
    """

    def __init__(self, owner: str) -> None:
        self.name = f"{owner}-{secrets.token_hex(8)}"
        with _environment():
            nixl = _load()
            self._nixl = nixl.nixl_agent(
                self.name, nixl.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
            )
        self._lock = threading.Lock()
        self._memory: dict[int, np.ndarray] = {}
        """Registered memory, by the number of its memfd."""
        self._peers: dict[str, set[bytes]] = {}
        """Metadata that is loaded, by the name of the agent."""

    @contextlib.contextmanager
    def lock(self, deadline: Deadline) -> Iterator[Any]:
        """NIXL's own agent, for this thread alone. TimeoutError if others hold it for too long."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise TimeoutError(f"other reads took all of {deadline.seconds:g} s")
        try:
            yield self._nixl
        finally:
            self._lock.release()

    def register(self, number: int, memory: memoryview, deadline: Deadline) -> None:
        """Have the whole mapping in which ``memory`` lies, of memfd ``number``, ready for transfers
        from now on."""
        if number in self._memory:
            return
        with self.lock(deadline) as nixl:
            if number not in self._memory:
                whole = np.frombuffer(memory.obj, np.uint8)
                nixl.register_memory([_span(whole)], "DRAM")
                self._memory[number] = whole

    def metadata(self, numbers: Iterable[int], deadline: Deadline) -> bytes:
        """Metadata by which a reader reaches this agent and the memfds ``numbers`` in it; about 450
        bytes."""
        with self.lock(deadline) as nixl:
            spans = nixl.get_reg_descs([_span(self._memory[number]) for number in numbers], "DRAM")
            return nixl.get_partial_agent_metadata(spans, True, ["UCX"])

    def add_peer(self, name: str, metadata: bytes, deadline: Deadline) -> None:
        """Make ``metadata`` of agent ``name`` known, unless it is; ValueError if it is another
        agent's."""
        if metadata in self._peers.get(name, ()):
            return
        with self.lock(deadline) as nixl:
            found = nixl.add_remote_agent(metadata).decode()
            if found != name:
                nixl.remove_remote_agent(found)
                self._peers.pop(found, None)
                raise ValueError(f"the metadata are of agent {found}")
            self._peers.setdefault(name, set()).add(metadata)

    def remove_peer(self, name: str) -> None:
        """Forget agent ``name``. What is under way from it may still land."""
        with self._lock:
            if self._peers.pop(name, None) is not None:
                with contextlib.suppress(Exception):
                    self._nixl.remove_remote_agent(name)

    def serve_readers(self, deadline: Deadline) -> None:
        """Let others connect, and serve what their cards cannot take by themselves."""
        # A reader that went away is no concern of the others.
        with self.lock(deadline) as nixl, contextlib.suppress(Exception):
            nixl.get_new_notifs()

    def close(self) -> None:
        """End all connections: nothing lands from now on. Transfers must be let go of before."""
        with self._lock:
            del self._nixl
            self._memory.clear()


class Transfer:
    """Reads, one after the other. While `is_open` the destination of the last one may be written at
    any time."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent, self._handle = agent, None

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def run(self, name: str, theirs: int, mine: int, size: int, deadline: Deadline) -> None:
        """Copy ``size`` bytes from address ``theirs`` in agent ``name`` to address ``mine`` here.

        TimeoutError if it takes too long, ConnectionError or one of NIXL's own if it fails.
        """
        with self._agent.lock(deadline) as nixl:
            spans = [
                nixl.get_xfer_descs([(address, size, 0)], "DRAM") for address in (mine, theirs)
            ]
            self._handle = nixl.initialize_xfer("READ", *spans, name)
            state = nixl.transfer(self._handle)
            if state == "DONE":
                self.release()
        if state != "DONE":
            self._wait(state, deadline)

    def _wait(self, state: str, deadline: Deadline) -> None:
        pause, spin_end = 0.0, time.monotonic() + _SPIN_S
        while state == "PROC":
            time.sleep(pause)
            if time.monotonic() > spin_end:
                pause = min(_LONGEST_PAUSE_S, pause + _PAUSE_GROWS_S)
            with self._agent.lock(deadline) as nixl:
                state = nixl.check_xfer_state(self._handle)
                if state == "DONE":
                    self.release()
        if state != "DONE":
            raise ConnectionError(f"the transfer ended as {state}")

    def release(self) -> None:
        """Free what NIXL keeps for it, its agent among that."""
        self._handle = None


def _span(whole: np.ndarray) -> tuple[int, int, int, str]:
    return address_of(memoryview(whole)), whole.nbytes, 0, ""
