"""NIXL, an optional package, and one NIXL agent: registered memory, peers, and reads from them."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
import time
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec
from mmap import mmap
from pathlib import Path
from typing import Any, cast

import numpy as np

from relax_hpc.net.transport.links import Deadline

# Wheels for CUDA 12, for CUDA 13, and builds from source have different module names. Reads between
# hosts do not use CUDA, so any of them works.
_PACKAGES = ("nixl_cu12", "nixl_cu13", "nixl")
# UCX_MODULES: the wheel of NIXL 1.5.1 crashes at the exit of its process (signal 11, in a
# destructor of its libnl) if UCX has loaded the module for EFA cards. This list leaves that module
# out. If a site sets the variable differently, its processes must end by os._exit after flushing
# their files.
_ENVIRONMENT = {
    "UCX_MODULES": "cma,ib,ib_mlx5",
    "UCX_LOG_LEVEL": "fatal",
    "NIXL_LOG_LEVEL": "FATAL",
}
"""Default values of variables for the libraries. Errors are raised as exceptions, so they need not
be printed as well."""
_SPIN_S = 3e-4
_PAUSE_GROWS_S = 1e-6
_LONGEST_PAUSE_S = 1e-3
"""Seconds between two checks of a transfer, at most. The first checks follow without a pause,
because most transfers end soon and a sleep takes at least 50 microseconds."""


def why_not_installed() -> str:
    """Instruction to install NIXL; empty: it is installed. Nothing is loaded."""
    return "" if _package() else "there is no package nixl-cu12; pip install --no-deps nixl-cu12"


def _package() -> str | None:
    return next(filter(find_spec, _PACKAGES), None)


def knows_all_cards() -> bool:
    """Whether NIXL uses the system's drivers of network cards."""
    package = _package()
    spec = find_spec(package) if package else None
    if spec is None or spec.origin is None:
        return False
    # The libibverbs in the wheel of NIXL 1.5.1 finds only the drivers in the wheel. Sites replace
    # it by a link to the system's library.
    libraries = Path(spec.origin).parent.with_name(f"{package}.libs").glob("libibverbs*")
    return all(path.is_symlink() for path in libraries)


def _load() -> Any:
    """Module with NIXL's classes. ImportError: NIXL is not installed."""
    package = _package()
    if package is None:
        raise ImportError(why_not_installed())
    return import_module(f"{package}._api")


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    """Set the variables while the libraries load, which is when they read them.

    Child processes of later do not inherit the variables.
    """
    added = {name: value for name, value in _ENVIRONMENT.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


def check_nixl() -> tuple[bool, str]:
    """Whether NIXL can be used in this process, and the reason if not."""
    try:
        with _environment():
            _load()
    except (ImportError, OSError) as error:
        return False, str(error)
    return True, ""


def address_of(memory: memoryview) -> int:
    """Address of ``memory`` in this process."""
    return np.frombuffer(memory, np.uint8).__array_interface__["data"][0]


class NixlAgent:
    """One NIXL agent, which one thread uses at a time. Any exception: NIXL cannot start.

    It runs without NIXL's progress thread, which would keep a core busy.
    """

    def __init__(self, owner: str) -> None:
        # A name is never used twice: NIXL 1.5.1 refuses metadata of an agent whose name is loaded.
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
        """Loaded metadata, by the name of the agent."""

    @contextlib.contextmanager
    def lock(self, deadline: Deadline) -> Iterator[Any]:
        """NIXL's agent, for exclusive use. TimeoutError: other threads use it for too long."""
        if not self._lock.acquire(timeout=deadline.remaining()):
            raise TimeoutError(f"other reads took all of {deadline.seconds:g} s")
        try:
            yield self._nixl
        finally:
            self._lock.release()

    def register(self, number: int, memory: memoryview, deadline: Deadline) -> None:
        """Register the whole mapping of memfd ``number``, which contains ``memory``."""
        if number in self._memory:
            return
        with self.lock(deadline) as nixl:
            if number not in self._memory:
                # `memory.obj` is the mmap of the memfd, see `slab.Memfd`.
                whole = np.frombuffer(cast(mmap, memory.obj), np.uint8)
                nixl.register_memory([_span(whole)], "DRAM")
                self._memory[number] = whole

    def metadata(self, numbers: Iterable[int], deadline: Deadline) -> bytes:
        """Metadata by which a reader reaches the memfds ``numbers`` of this agent, 450 bytes."""
        with self.lock(deadline) as nixl:
            spans = nixl.get_reg_descs([_span(self._memory[number]) for number in numbers], "DRAM")
            return nixl.get_partial_agent_metadata(spans, True, ["UCX"])

    def add_peer(self, name: str, metadata: bytes, deadline: Deadline) -> None:
        """Load ``metadata`` of agent ``name``. ValueError: they are of another agent."""
        if metadata in self._peers.get(name, ()):
            return
        with self.lock(deadline) as nixl:
            loaded = nixl.add_remote_agent(metadata).decode()
            if loaded != name:
                nixl.remove_remote_agent(loaded)
                self._peers.pop(loaded, None)
                raise ValueError(f"the metadata are of agent {loaded}")
            self._peers.setdefault(name, set()).add(metadata)

    def remove_peer(self, name: str) -> None:
        """Unload the metadata of agent ``name``. Open transfers from it may still write."""
        with self._lock:
            if self._peers.pop(name, None) is not None:
                with contextlib.suppress(Exception):
                    self._nixl.remove_remote_agent(name)

    def serve_readers(self, deadline: Deadline) -> None:
        """Let readers connect, and serve emulated reads."""
        # An error of one reader, which has ended, must not affect the others.
        with self.lock(deadline) as nixl, contextlib.suppress(Exception):
            nixl.get_new_notifs()

    def close(self) -> None:
        """End all connections, so that no transfer writes any more. Release transfers before."""
        with self._lock:
            del self._nixl
            self._memory.clear()


class Transfer:
    """Consecutive reads. While `is_open`, the last one may write to its destination at any time."""

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._handle: Any = None

    @property
    def is_open(self) -> bool:
        return self._handle is not None

    def run(self, name: str, source: int, target: int, size: int, deadline: Deadline) -> None:
        """Copy ``size`` bytes from address ``source`` of agent ``name`` to address ``target``.

        TimeoutError: it takes too long. ConnectionError or an exception of NIXL: it has failed.
        """
        with self._agent.lock(deadline) as nixl:
            spans = [
                nixl.get_xfer_descs([(address, size, 0)], "DRAM") for address in (target, source)
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
        """Free the memory that NIXL keeps for the transfer, which includes its agent."""
        self._handle = None


def _span(whole: np.ndarray) -> tuple[int, int, int, str]:
    return address_of(whole.data), whole.nbytes, 0, ""
