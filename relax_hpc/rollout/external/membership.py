"""External engines that should serve, as the hub's operations say, and the pool of those that do.

The hub decides which engines are wanted, and gives each its number. This process makes them join
and leave, and reports their states, from which the states of operations follow.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from relax_hpc.base.errors import DeadlineError, RelaxError
from relax_hpc.base.foreign_files import read_regular
from relax_hpc.base.rundir import read_map
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.queue.client.operations import WantedState
from relax_hpc.queue.operations import ExternalEngine
from relax_hpc.rollout.external.engine import ExternalAddress
from relax_hpc.rollout.external.member import LEFT, ExternalMember
from relax_hpc.rollout.external.shared_versions import SharedVersions

if TYPE_CHECKING:
    from relax_hpc.rollout.rollout_rank import Rollout

_WATCH_S = 30.0
"""Seconds for a change of the wanted engines. After that the request is sent again."""
_MAX_KEY_BYTES = 4096
_SERVICE_FILE = Path("service", "api.json")
"""File in the run directory with the address and the token of the run's service."""
_NO_SERVICE = "http://127.0.0.1:9"
"""Address at which no server answers, while the service has not published its own. The join is
tried again."""
RELAY_PATH = "/members/{member}/engine"
"""Path at the service below which requests go to the engine of a member."""


class ExternalMembership:
    """Follows the external engines of a run, in the first process of its first rollout group."""

    def __init__(self, rollout: Rollout) -> None:
        self._rollout, self._pool = rollout, rollout.pool
        self._requests = rollout.client.operations
        self._shared = SharedVersions(rollout.context.run.root / "external")
        self._names: dict[int, str] = {}
        """Names of the engines by number, as the hub knows them."""

    async def follow(self) -> None:
        """Let engines join and leave as the hub requests it, until cancelled."""
        await self._shared.clear()
        revision = -1
        while True:
            watching = self._requests.watch(revision, _WATCH_S)
            with contextlib.suppress(DeadlineError):
                wanted = await asyncio.wrap_future(watching)
                revision = wanted.revision
                self.apply(wanted)

    def apply(self, wanted: WantedState) -> None:
        """Make the engines of the pool those that ``wanted`` names."""
        members = self._pool.members
        for engine in wanted.external:
            self._names[engine.number] = engine.name
            member = members.get(engine.number)
            if engine.wanted and engine.state != LEFT and not member:
                self._join(engine)
            elif not engine.wanted and isinstance(member, ExternalMember):
                if not member.leaving.is_set():
                    print(f"external engine {engine.name} leaves", flush=True)
                    self._pool.remove(engine.number)
            elif not engine.wanted and engine.state != LEFT:
                self.report(engine.number, LEFT)
        left = {engine.name for engine in wanted.external if engine.state == LEFT}
        for operation in wanted.operations:
            removed = [name for name in operation.leftover if name in left]
            if removed:
                _log_failure(self._requests.note_removed(operation.id, removed))

    def _join(self, engine: ExternalEngine) -> None:
        print(f"external engine {engine.name} joins: {engine.url or engine.member}", flush=True)
        member = ExternalMember(
            self._rollout,
            engine.number,
            lambda: self._find_address(engine),
            self._shared,
            self.report,
        )
        self._pool.add(engine.number, member)

    def _find_address(self, engine: ExternalEngine) -> ExternalAddress:
        """Present address of an engine. The service of the run may have moved to another port."""
        if not engine.member:
            return ExternalAddress(number=engine.number, url=engine.url, key=self._read_key())
        service = read_map(self._rollout.context.run.root / _SERVICE_FILE, url=str, token=str)
        path = RELAY_PATH.format(member=quote(engine.member, safe=""))
        return ExternalAddress(
            number=engine.number,
            url=f"{service.get('url', _NO_SERVICE)}{path}",
            key=service.get("token", ""),
            has_member=True,
        )

    def _read_key(self) -> str:
        """API key of servers that join by URL; empty: they have none, or it cannot be read."""
        path = self._rollout.config.rollout.external.key_file
        if not path:
            return ""
        try:
            return read_regular(Path(path), _MAX_KEY_BYTES).decode(errors="replace").strip()
        except OSError as error:
            print(log_entry(f"rollout.external.key_file: {error}"), flush=True)
            return ""

    def report(
        self,
        number: int,
        state: str,
        phase: str = "",
        reason: str = "",
        detail: str = "",
        next_try: float = 0.0,
    ) -> None:
        """Report the state of an engine to the hub, see `ReportState`."""
        name = self._names[number]
        _log_failure(self._requests.report_engine(name, state, phase, reason, detail, next_try))


def _log_failure(report: Future[Any]) -> None:
    """Write to the log why the hub did not accept a ``report``."""

    def log(done: Future[Any]) -> None:
        try:
            done.result()
        except RelaxError as error:
            print(log_entry(f"a report about an external engine failed: {error}"), flush=True)

    report.add_done_callback(log)
