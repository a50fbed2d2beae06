"""The loop of the autoscaler in the role `api`: it samples the live state of the run, decides, and
creates operations as any other client does."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter, deque
from dataclasses import asdict, dataclass
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.rundir import write_atomic
from relax_hpc.queue.operations import IN, NOOP, OUT, Operation, OperationRefused
from relax_hpc.service.autoscaler.live_inputs import (
    KEY,
    count_engines,
    count_reversals,
    describe_open,
    expected_start_s,
    make_sample,
    measured_start_s,
    nodes_per_engine,
    policy_state,
    running_nodes,
)
from relax_hpc.service.autoscaler.observations import Facts, ObservationLog, Observations
from relax_hpc.service.autoscaler.policy import Decision, Limits, decide
from relax_hpc.service.autoscaler.slurm_inputs import SlurmInputs
from relax_hpc.service.live_run import HUB_S, LiveRun

_SAMPLE_S = 1.0
_HISTORY = 100
"""Decisions that are kept in memory."""
_MAX_REVERSALS = 3
"""Decisions that another client may reverse before the autoscaler switches itself off."""
_MAX_LOG_BYTES = 4 << 20


@dataclass(slots=True)
class SavedState:
    """State that survives a restart of the service, in RUN/service/autoscaler.json."""

    enabled: bool
    enabled_at: float = 0.0
    """Wall-clock time at which it was switched on."""
    configured: bool = False
    """`service.autoscaler.enabled` at that time. If the setting has changed since, it decides."""
    node_hours: float = 0.0
    """Node-hours of all rollout jobs while the service ran."""


class Autoscaler:
    """The autoscaler of one run."""

    def __init__(self, live: LiveRun, slurm: SlurmInputs | None = None) -> None:
        self.live, self.policy = live, live.config.service.autoscaler
        self.slurm = slurm or SlurmInputs(live.config)
        self.log = ObservationLog()
        self.decision: Decision | None = None
        self.decided_at = 0.0
        self.history: deque[dict[str, Any]] = deque(maxlen=_HISTORY)
        """Decisions that differ from the one before, newest last."""
        self.counts: Counter[str] = Counter()
        """Limits that were reached, refused requests and reversals, by name."""
        self.off_reason = ""
        """Reason why the autoscaler has switched itself off."""
        self._file = live.run.root / "service" / "autoscaler.json"
        self._log_file = live.run.root / "logs" / "autoscaler.jsonl"
        self.saved = self._load()
        self._counted_at: float | None = None

    @property
    def limits(self) -> Limits:
        service = self.live.config.service
        return Limits(service.min_engines, service.max_engines or service.min_engines)

    async def run(self) -> None:
        """Sample and decide until cancelled."""
        next_decision_s = 0.0
        while True:
            await asyncio.sleep(min(_SAMPLE_S, self.policy.evaluate_s))
            is_active = self.saved.enabled or self.policy.dry_run
            if not self.sample() or not is_active or time.monotonic() < next_decision_s:
                continue
            next_decision_s = time.monotonic() + self.policy.evaluate_s
            try:
                await self.evaluate()
            except (RelaxError, OSError) as error:
                # The hub, Slurm or the disk does not answer. The next decision tries again.
                self.counts[f"failed_{type(error).__name__}"] += 1

    def sample(self) -> bool:
        """Add the newest state of the run; False: the hub is away."""
        live = self.live
        if live.is_hub_away or live.status is None or live.present is None:
            self._counted_at = None
            return False
        if not live.present.is_reported:
            return False
        self.log.add(make_sample(live, live.status))
        now = time.monotonic()
        if self._counted_at is not None:
            hours = (now - self._counted_at) / 3600.0
            self.saved.node_hours += running_nodes(live) * hours
        self._counted_at = now
        return True

    async def evaluate(self) -> Decision:
        """Decide once, and create the operation that follows."""
        await asyncio.to_thread(self.slurm.update)
        listing = self.live.client.operations.list(timeout=HUB_S)
        operations = [*await self.live.ask(listing)]
        observed = self.observe(operations)
        decision = decide(observed, self.policy, self.limits, policy_state(operations))
        self._check_reversals(operations)
        self._remember(decision)
        await asyncio.to_thread(self._save)
        if self.saved.enabled and not self.policy.dry_run and decision.target != decision.engines:
            await self._apply(decision, operations)
        return decision

    def observe(self, operations: list[Operation]) -> Observations:
        """The windows and facts for a decision."""
        live = self.live
        assert live.status and live.present
        _, starting = count_engines(live)
        start_s = measured_start_s(operations)
        facts = Facts(
            starting=starting,
            ready_groups=live.status.depth.get("ready", 0),
            step_groups=live.config.prompts_per_step,
            oldest_generation_s=float(live.status.oldest_s.get("generating") or 0.0),
            start_s=start_s,
            expected_start_s=expected_start_s(live),
            idle_nodes=self.slurm.idle_nodes,
            nodes_per_engine=nodes_per_engine(live.config),
            job_time_left_s=self.slurm.job_time_left_s,
            node_hours_used=self.saved.node_hours,
            open_operation=describe_open(operations),
        )
        cooldown_s = self.policy.cooldown_in * (start_s or self.policy.start_s)
        return self.log.observe(facts, self.policy.window_s, cooldown_s)

    async def _apply(self, decision: Decision, operations: list[Operation]) -> None:
        """Create the operation of a decision.

        The key names the decision and the operation before it. So a repeated request, also of a
        second autoscaler, creates one operation.
        """
        kind = OUT if decision.target > decision.engines else IN
        former = max((operation.id for operation in operations), default="none", key=_order)
        key = f"{KEY}{former}-{kind}-{decision.target}"
        service = self.live.config.service
        timeout_s = service.scale_out_timeout_s if kind == OUT else service.scale_in_timeout_s
        create = self.live.client.operations.create
        body = self.make_body(kind, decision.target)
        try:
            # The hub also counts engines that are lost. An operation without an effect would be
            # stored again at each decision, and in the end replace all earlier ones.
            dry = await self.live.ask(create(kind, {**body, "dry_run": True}, timeout=HUB_S))
            if dry.operation.state == NOOP:
                self.counts["without_effect"] += 1
                return
            await self.live.ask(create(kind, body, key, timeout_s, timeout=HUB_S))
        except OperationRefused as refusal:
            # Another client was faster, or the target is not possible; later decisions see it.
            self.counts[f"refused_{refusal.code}"] += 1
            await asyncio.to_thread(self._write_log, {"refused": refusal.code, "why": str(refusal)})

    def make_body(self, kind: str, target: int) -> dict[str, Any]:
        """Body of an operation. In Slurm, the jobs of new engines have the limits of the
        policy."""
        body: dict[str, Any] = {"num_replicas": target}
        if kind == OUT and self.live.config.layout != "local":
            limits = {"time": self.policy.time, "time_min": self.policy.time_min}
            body |= {name: value for name, value in limits.items() if value}
        return body

    def _check_reversals(self, operations: list[Operation]) -> None:
        """Switch off if another client, such as a second autoscaler, reverses the decisions."""
        reversals = count_reversals(operations, self.saved.enabled_at)
        if self.saved.enabled and reversals >= _MAX_REVERSALS:
            self.counts["reversed"] += reversals
            self.set_enabled(False)
            self.off_reason = (
                f"another client reversed {reversals} decisions, as a second autoscaler would; "
                "stop it, then POST /autoscaler/enable"
            )
            print(f"autoscaler: {self.off_reason}", flush=True)

    def set_enabled(self, enabled: bool) -> None:
        """Switch the autoscaler on or off. The choice survives a restart of the service."""
        self.saved.enabled, self.saved.enabled_at = enabled, time.time()
        self.off_reason = ""
        self._save()

    def describe(self) -> dict[str, Any]:
        """State for clients."""
        decision = self.decision
        return {
            "enabled": self.saved.enabled,
            "dry_run": self.policy.dry_run,
            "reason_off": self.off_reason,
            "engines": decision.engines if decision else None,
            "target": decision.target if decision else None,
            "decision": decision.line if decision else "no decision yet",
            "limit": decision.limit if decision else "",
            "decided_at": self.decided_at,
            "node_hours": self.saved.node_hours,
            "limits": asdict(self.limits),
            "policy": asdict(self.policy),
            "counts": dict(self.counts),
            "history": list(self.history),
        }

    # -- files -------------------------------------------------------------------------------------

    def _remember(self, decision: Decision) -> None:
        former, self.decision, self.decided_at = self.decision, decision, time.time()
        if decision.limit:
            self.counts[f"limited_by_{decision.limit.partition('=')[0].partition(' (')[0]}"] += 1
        changes = decision.target != decision.engines
        is_new = not former or (former.target, former.limit) != (decision.target, decision.limit)
        if changes or is_new:
            entry = {"time": self.decided_at, "decision": decision.line, "limit": decision.limit}
            self.history.append(entry)
            self._write_log(entry)

    def _write_log(self, entry: dict[str, Any]) -> None:
        """Add a line to logs/autoscaler.jsonl, as far as its size permits."""
        try:
            if self._log_file.exists() and self._log_file.stat().st_size > _MAX_LOG_BYTES:
                return
            self._log_file.parent.mkdir(exist_ok=True)
            with self._log_file.open("a") as file:
                file.write(json.dumps({"time": time.time()} | entry) + "\n")
        except OSError:
            # Logs never end a process, and decisions do not depend on them.
            self.counts["log_failed"] += 1

    def _load(self) -> SavedState:
        """The saved state. Without one, or after a change of the setting, the setting decides."""
        setting = self.policy.enabled
        state = SavedState(setting, time.time(), setting)
        try:
            values = json.loads(self._file.read_text())
            state.node_hours = float(values["node_hours"])
            if values["configured"] is setting:
                state.enabled = bool(values["enabled"])
                state.enabled_at = float(values["enabled_at"])
        except (OSError, ValueError, KeyError, TypeError):
            # A new run, or a file that somebody has changed.
            return state
        return state

    def _save(self) -> None:
        self._file.parent.mkdir(mode=0o700, exist_ok=True)
        write_atomic(self._file, json.dumps(asdict(self.saved)).encode())


def _order(id: str) -> int:
    """Number of an operation in the order of creation, over both kinds."""
    digits = id.rpartition("-")[2]
    return int(digits) if digits.isdigit() else 0
