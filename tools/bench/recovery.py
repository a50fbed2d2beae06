"""What a fault costs: detection, time to working again, what the other groups notice, samples lost
and duplicated.

Breaks a small run on a private Slurm (the sandbox, made for this and taken down), one fault after
the other, and beside it does the same under the policy of restarting everything from the last
checkpoint, by the same commands and code.

    python tools/bench/recovery.py --layout het --fault kill:rollout --fault node:actor --repeat 3
    --json
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from figures import Figure, print_result
from recovery_figures import COLUMNS, NEVER, Record, result, share, table, targets
from recovery_run import Run

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.cluster.sandbox import Options, Sandbox, cluster
from relax_hpc.config.roles import RANKED
from relax_hpc.ops.observe.status import status
from relax_hpc.queue.inspect.audit import audit

BEAT_S, LEASE_S, CHECKPOINT_STEPS = 1.0, 5.0, 5
LAYOUTS, POLICIES = ("het", "jobs"), ("toolkit", "restart-all")
GROUPS = {
    "controller": "hub",
    "advantages": "hub",
    "supervisor": "hub",
    "hub": "hub",
    "rollout": "rollout",
    "actor": "actor",
    "actor_fwd": "actor_fwd",
}
"""What a fault names -> the group that it takes; the hub's roles are the supervisor's children."""
FAULTS = {
    "kill": (
        "SIGKILL of one rank",
        ("rollout", "actor", "actor_fwd", "advantages", "controller", "supervisor"),
    ),
    "node": (
        "power loss of a node, which Slurm is not told of",
        ("rollout", "actor", "actor_fwd", "hub"),
    ),
    "down": (
        "power loss of a node, which Slurm is told of",
        ("rollout", "actor", "actor_fwd", "hub"),
    ),
    "scancel": ("scancel of the component, or the job", ("rollout", "actor", "actor_fwd")),
}
SANDBOX = Options(
    nodes=14, cpus=8, memory=4000, gpus=2, slurmd_timeout=10, kill_wait=3, cred_expire=6
)
"""Enough nodes that a replacement never waits for those that were lost."""
SETTINGS: dict[str, Any] = {
    "seed": 3,
    "steps": 100_000,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "max_staleness": 1,
    "model": {
        "tiny": {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "intermediate_size": 64}
    },
    "data": {
        "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "digits": 3,
        "max_prompt_tokens": 32,
    },
    "rollout": {
        "replicas": 2,
        "max_new_tokens": 5,
        "groups_per_request": 2,
        # An engine's start would be the same under both policies, and hide the rest.
        "engine": {"kind": "simulated", "simulated": {"response_s": 0.3}},
    },
    "actor": {"parallel": {"data": 2}, "optimizer": {"lr": 1e-3}},
    "checkpoint": {"every": CHECKPOINT_STEPS},
    "eval": {"every": 0},
    "liveness": {
        "beat_s": BEAT_S,
        "lease_s": LEASE_S,
        "start_timeout_s": 120.0,
        "stop_timeout_s": 20.0,
    },
    "slurm": {"time": "120", "signal_s": 60},
    "groups": {
        "reference": None,
        "actor_fwd": {},
        "hub": {"resources": {"nodes": 2}},
        "rollout": {"resources": {"nodes": 2}},
        "actor": {"resources": {"nodes": 2}},
    },
}
START_S, RECOVERY_S, SETTLED_STEPS, STEPS_AFTER = 90.0, 120.0, 4, 2
AHEAD_S = 1.0


def settings(layout: str, ahead: bool = True) -> dict[str, Any]:
    """Seven nodes, in a heterogeneous job or in ordinary ones; the death of a node concerns one
    group.

    ``ahead``: next incarnations are started beside those at work, at once where a run would wait
    for a minute.
    """
    site = {"site": {"options": {"exclusive": ""}}} if layout == "jobs" else {}
    liveness = SETTINGS["liveness"] | {"start_ahead_s": AHEAD_S if ahead else 0.0}
    return SETTINGS | site | {"liveness": liveness}


def all_faults() -> list[str]:
    return [f"{kind}:{what}" for kind, (_, parts) in FAULTS.items() for what in parts]


# -- one fault -------------------------------------------------------------------------------------


def settle(run: Run, fault: str) -> None:
    """Everything works, and has for some steps; the hub has its standby, and what is started ahead
    waits.

    TimeoutError if not.
    """
    goal = run.step() + SETTLED_STEPS
    run.wait(lambda: run.step() >= goal, f"step {goal} trained", START_S)
    group = GROUPS[fault.partition(":")[2]]
    if run.config.liveness.start_ahead_s and set(run.config.groups[group].roles) & set(RANKED):
        run.wait(lambda: run.waits_ahead(group), f"the next incarnation of {group} waits", START_S)
    if fault in ("node:hub", "down:hub"):
        run.wait(run.standbys, "a standby waits", START_S)


def measure(run: Run, policy: str, fault: str) -> Record:
    """Inflict ``fault``, see it through, and power the node on again."""
    kind, what = fault.split(":")
    names = {"layout": run.layout, "policy": policy, "fault": fault, "victim": GROUPS[what]}
    record = Record(
        **names,
        beat_s=BEAT_S,
        lease_s=LEASE_S,
        job=run.job(GROUPS[what]),
        step=run.step(),
        at=time.time(),
    )
    node = run.inflict(kind, what)
    try:
        (_restart_all if policy == "restart-all" else _live_on)(run, record)
    except (TimeoutError, RuntimeError) as error:
        print(f"{fault}: {error}\n{run.story()}", file=sys.stderr, flush=True)
    finally:
        if node:
            run.sandbox.start_node(node, rebooted=True)
    return record


def _live_on(run: Run, record: Record) -> None:
    """The toolkit's own way: the group comes back by itself, the others go on."""
    if record.layout == "jobs" and record.fault.startswith("scancel"):
        run.wait(lambda: _detected(run, record) < NEVER, "its job is gone", RECOVERY_S)
        # Whoever ends a group's job means it; nobody else may start it again.
        record.helped = "resubmitted by hand"
        run.relax_hpc("resubmit", str(run.run.root), "--group", record.victim)
    run.wait(lambda: _works(run, record, record.at), f"{record.victim} works again", RECOVERY_S)
    beats = run.wait(lambda: status(run.run).get("beats"), "the hub answers", START_S)
    record.gaps = {
        name: beat["gap_s"] for name, beat in beats.items() if beat["group"] != record.victim
    }


def _restart_all(run: Run, record: Record) -> None:
    """The other policy: as soon as the fault is known, everything is ended and starts at the last
    checkpoint."""
    run.wait(lambda: _detected(run, record) < NEVER, "the fault is noticed", RECOVERY_S)
    record.detected = detected = _detected(run, record)
    run.relax_hpc("stop", str(run.run.root), "--now")
    # Steps that were still trained until then have to be trained again as well.
    record.step, since = max(record.step, run.step()), time.time()
    run.submit("--resume")
    run.wait(lambda: _works(run, record, since), "the run is back where it was", RECOVERY_S)
    record.detected = detected
    others = {name for name in run.config.groups if name != record.victim}
    record.gaps = {name: run.first(name, "inc-*[0-9].json", since)[0] - detected for name in others}


def _detected(run: Run, record: Record) -> float:
    """The first sign that the fault is known: a word about the victim, its new incarnation, its job
    queued again."""
    names = {
        record.victim,
        run.supervisor if record.victim == "hub" else f"supervisor-{record.victim}",
    }
    claims = [run.first(name, "inc-*.claim", record.at)[0] for name in names]
    takes_the_job = record.layout == "jobs" and record.fault.startswith(
        ("node:", "down:", "scancel:")
    )
    if takes_the_job and record.left == NEVER and not run.runs(record.job):
        record.left = time.time()
    return min(run.said(record.victim, record.at), record.left, *claims)


def _works(run: Run, record: Record, since: float) -> bool:
    """Whether the victim works, and steps are trained with it: gaps between steps are known when
    they are over."""
    _look(run, record, since)
    found = result(record)
    again = record.at + max(found.working, found.caught_up)
    return sum(moment > again for moment, _ in record.steps) >= STEPS_AFTER


def _look(run: Run, record: Record, since: float) -> None:
    """Bring ``record`` up to date; the new incarnation is one that was started after ``since``."""
    record.detected = _detected(run, record)
    record.launched, incarnation = run.first(record.victim, "inc-*.launch.json", since)
    record.beaten = run.first(record.victim, f"inc-{incarnation:06d}.json", since)[0]
    record.accepted = [moment for moment in list(run.follower.accepted) if moment > since]
    steps = run.trained()
    record.steps = steps[: sum(moment <= record.at for moment, _ in steps)][-1:]
    record.steps += [(moment, step) for moment, step in steps if moment > since]
    if record.beaten < NEVER:
        job = run.job(record.victim)
        submitted, started = run.job_times(job)
        record.new_job = started >= math.floor(record.at)
        # What Slurm says of a job that is queued again is not when that was.
        queued = record.left if record.left < NEVER and job == record.job else submitted
        record.queued_s = max(0.0, started - queued) if record.new_job else 0.0


# -- all of them -----------------------------------------------------------------------------------


def measure_all(
    sandbox: Sandbox,
    folder: Path,
    layout: str,
    policy: str,
    faults: Sequence[str],
    ahead: bool = True,
) -> Iterator[Record]:
    """Every fault in turn, in one run as long as that stays as it was submitted."""
    left = list(faults)
    while left:
        here = Path(tempfile.mkdtemp(prefix="run-", dir=folder))
        run, records = Run(sandbox, here, layout, settings(layout, ahead)), []
        try:
            while left and not (records and _used_up(records[-1])):
                settle(run, left[0])
                records.append(measure(run, policy, left.pop(0)))
                _tell(records[-1])
            if result(records[-1]).working < NEVER:
                run.relax_hpc("stop", str(run.run.root))
                _account(run, records)
        finally:
            run.close()
        shutil.rmtree(here)
        yield from records


def _used_up(record: Record) -> bool:
    """A group that went to another job, or never came back, would make the next fault another
    one."""
    moved = record.policy == "toolkit" and record.new_job and record.layout == "het"
    return moved or result(record).working == NEVER or record.fault in ("node:hub", "down:hub")


def _account(run: Run, records: list[Record]) -> None:
    """Samples lost and duplicated, by fault, once everything of the run has ended."""
    found = audit(
        run.run, steps=len([row for row in read_metrics(run.run.root) if "reward/mean" in row])
    )
    size = run.config.prompts_per_step
    for record, lost, twice in zip(
        records,
        share(found.lost, records, size),
        share(found.duplicated, records, size),
        strict=True,
    ):
        record.lost, record.duplicated = lost, twice
    for problem in found.problems:
        print(f"audit: {problem}", file=sys.stderr, flush=True)


def _tell(record: Record) -> None:
    values = asdict(result(record)).items()
    figures = ", ".join(
        f"{name} {value:.2f}" for name, value in values if name not in ("lost", "duplicated")
    )
    print(f"{record.layout} {record.policy} {record.fault}: {figures}", file=sys.stderr, flush=True)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line; what is left out means all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.epilog = "faults: " + "; ".join(
        f"{', '.join(f'{kind}:{part}' for part in parts)}: {text}"
        for kind, (text, parts) in FAULTS.items()
    )
    parser.add_argument("--layout", action="append", choices=LAYOUTS)
    parser.add_argument(
        "--fault", action="append", choices=all_faults(), metavar="KIND:WHAT", help="see below"
    )
    parser.add_argument("--policy", action="append", choices=POLICIES)
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="times each; N > 1 shows p50/p95"
    )
    parser.add_argument(
        "--no-ahead", dest="ahead", action="store_false", help="liveness.start_ahead_s: 0"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args(argv)
    if args.repeat < 1:
        parser.error(f"--repeat: found {args.repeat}, allowed 1 and more")
    args.layout, args.policy = args.layout or list(LAYOUTS), args.policy or list(POLICIES)
    args.fault = args.fault or all_faults()
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print; 0 even when a target is missed, 1 when a run did not come to work."""
    args = parse(argv)
    # What was started is ended however this program is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load = os.getloadavg()[0]
    folder = Path(tempfile.mkdtemp(prefix="recovery-")).resolve()
    records: list[Record] = []
    failed = 0
    try:
        sandbox = cluster.up(folder, SANDBOX)
        for layout in args.layout:
            for policy in args.policy:
                for record in measure_all(
                    sandbox, folder, layout, policy, args.fault * args.repeat, args.ahead
                ):
                    records.append(record)
    except (TimeoutError, RuntimeError) as error:
        print(f"ended early: {error}", file=sys.stderr, flush=True)
        failed = 1
    finally:
        cluster.down(folder)
        shutil.rmtree(folder)
    _print(
        sorted(records, key=lambda r: (args.layout.index(r.layout), args.fault.index(r.fault))),
        load,
        args,
    )
    return failed


def _print(records: list[Record], load: float, args: argparse.Namespace) -> None:
    print("\n".join(table(records)))
    print("\n".join(f"{name.replace('_', ' ')}: {text}" for name, text in COLUMNS.items()))
    print(targets(BEAT_S, LEASE_S))
    about = {
        "beat_s": BEAT_S,
        "lease_s": LEASE_S,
        "checkpoint_steps": CHECKPOINT_STEPS,
        "repeat": args.repeat,
    }
    about |= {
        "engine": "simulated",
        "ahead": args.ahead,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
    }
    print("settings: " + ", ".join(f"{key}={value}" for key, value in about.items()))
    if args.json:
        lines = [
            {"layout": r.layout, "fault": r.fault, "policy": r.policy} | _finite(r) for r in records
        ]
        print_result(_figures(lines), about, records=lines)


FAULT_UNITS = {
    "detect": "s",
    "working": "s",
    "caught_up": "s",
    "lost": "samples",
    "duplicated": "samples",
}
"""Columns of a fault that the result has as figures, with their units."""


def _figures(lines: list[dict[str, Any]]) -> list[Figure]:
    """One figure for each fault and column: the median of its repetitions."""
    rounds: dict[tuple[str, str], list[float]] = {}
    for line in lines:
        for column, unit in FAULT_UNITS.items():
            if line[column] is not None:
                name = f"{line['layout']}, {line['policy']}, {line['fault']}: {column}"
                rounds.setdefault((name, unit), []).append(line[column])
    return [
        Figure(name, median(values), unit, rounds=values) for (name, unit), values in rounds.items()
    ]


def _finite(record: Record) -> dict[str, float | None]:
    return {
        name: value if math.isfinite(value) else None
        for name, value in asdict(result(record)).items()
    }


if __name__ == "__main__":
    sys.exit(main())
