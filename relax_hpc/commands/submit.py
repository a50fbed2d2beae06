"""`relax-hpc submit`: make the run directory, render what Slurm is handed, and hand it over."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.layout import components, gpu_hours, node_hours
from relax_hpc.cluster.slurm.render import render, render_group
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.slurm.successors import Successors
from relax_hpc.cluster.supervise.attempts import latest_attempt, new_attempt
from relax_hpc.commands.run_setup import establish
from relax_hpc.commands.snapshot import take_snapshot
from relax_hpc.config import Config
from relax_hpc.ops.doctor.doctor import diagnose


def submit(config: Config, resume: bool, dry_run: bool, form: str = "") -> int:
    """Submit a run, or with ``dry_run`` only write what would be; ``form``: "json" or "parsable"
    for programs."""
    # What cannot be had leaves no run directory behind.
    render(config)
    if not dry_run:
        _refuse_mistakes(config)
    run, config = establish(config, resume)
    if run.finished.exists():
        print(f"{run.root}: the run is finished already; to go on, resume with more --steps")
        return EXIT_DONE
    take_snapshot(run)
    for name, text in render(config).items():
        write_atomic(run.submit / name, text.encode())
    entries: list[Submission] = []
    if not dry_run:
        new_attempt(run)
        entries = _submit_all(run, config, Slurm())
    _tell(run, config, entries, form)
    return EXIT_DONE


def _refuse_mistakes(config: Config) -> None:
    """Print what `relax-hpc doctor` finds on stderr; ConfigError if any of it is an error."""
    found = [finding for finding in diagnose(config, Slurm()) if finding.severity != "ok"]
    errors = [finding.text for finding in found if finding.severity == "error"]
    for text in [
        f"warning: {finding.text}" for finding in found if finding.severity == "warning"
    ] + errors[1:]:
        print(f"relax-hpc: {text}", file=sys.stderr)
    if errors:
        raise ConfigError(errors[0])


def _submit_all(run: RunDir, config: Config, slurm: Slurm) -> list[Submission]:
    """Everything or nothing: if one submission fails, those before it are withdrawn."""
    ledger, entries = Ledger(run), []
    try:
        for entry in (_jobs if config.layout == "jobs" else _whole)(run, config, slurm):
            ledger.add(entry)
            entries.append(entry)
    except RelaxError:
        for entry in entries:
            with contextlib.suppress(RelaxError):
                slurm.cancel(entry.job)
        raise
    return entries


def _jobs(run: RunDir, config: Config, slurm: Slurm) -> Iterator[Submission]:
    """Jobs to submit: the hub, then the others, which would only wait for it."""
    attempt = latest_attempt(run)
    hub = slurm.submit(run.submit / "hub.sbatch")
    yield Submission(hub, "group", "hub", attempt=attempt)
    for name in config.groups:
        if name != "hub":
            job = slurm.submit(run.submit / f"{name}.sbatch", f"--dependency=after:{hub}")
            yield Submission(job, "group", name, attempt=attempt)
    yield from _successors(run, config, slurm, hub)


def _whole(run: RunDir, config: Config, slurm: Slurm) -> Iterator[Submission]:
    """The job of all groups; where nodes may not call sbatch, with its successors and the groups'
    spares."""
    attempt, script = latest_attempt(run), run.submit / "run.sbatch"
    job = slurm.submit(script)
    yield Submission(job, "run", attempt=attempt)
    if config.layout != "het" or config.site.sbatch_on_nodes:
        return
    yield from _successors(run, config, slurm, job)
    for name, group in config.groups.items():
        for _ in range(group.spares):
            spare = run.submit / f"{name}.sbatch"
            write_atomic(spare, render_group(config, name).encode())
            yield Submission(slurm.submit(spare, "--hold"), "spare", name, attempt=attempt)


def _successors(run: RunDir, config: Config, slurm: Slurm, job: str) -> Iterator[Submission]:
    """Submit all jobs that may follow ``job``, each after the one before, where nodes may not call
    sbatch."""
    if config.site.sbatch_on_nodes:
        return
    followers = Successors(run, config, slurm, latest_attempt(run))
    for _ in range(config.slurm.successors):
        entry = followers.submit(job)
        job = entry.job
        yield entry


def successors(config: Config) -> int:
    """Jobs that may follow the run's own if it is not finished at the time limit."""
    return config.slurm.successors if config.layout == "het" else 0


def cost_line(config: Config) -> str:
    """Line about the hours that a run asks for until the first time limit, and about what may
    follow."""
    gpus, nodes, more = gpu_hours(config), node_hours(config), successors(config)
    line = f"asks for {gpus:.1f} GPU-hours ({nodes:.1f} node-hours) at most"
    if config.layout == "jobs":
        return (
            f"{line} until the first time limit; the jobs are then requeued until the run is "
            "finished"
        )
    if not more:
        return line
    total = f"{gpus * (more + 1):.1f} GPU-hours ({nodes * (more + 1):.1f} node-hours)"
    return (
        f"{line} in one job; up to {more} jobs follow until the run is finished "
        f"(slurm.successors): {total} at most"
    )


def _tell(run: RunDir, config: Config, entries: list[Submission], form: str) -> None:
    hours = {"gpu_hours": round(gpu_hours(config), 1), "node_hours": round(node_hours(config), 1)}
    if form == "json":
        counts = {"successors": successors(config)}
        print(
            json.dumps(
                {
                    "run_dir": str(run.root),
                    **hours,
                    **counts,
                    "jobs": [asdict(entry) for entry in entries],
                }
            )
        )
        return
    if form == "parsable":
        print("\n".join(entry.job for entry in entries))
        return
    for part in components(config):
        gpus = f"{part.gpus_per_node} GPUs" if part.gpus_per_node else "CPU"
        print(f"{' + '.join(part.groups):<20} {part.nodes:>4} nodes  {gpus:<7} {part.time}")
    print(cost_line(config))
    for entry in entries:
        print(f"submitted job {entry.job} ({entry.group or entry.kind})")
    print(f"run directory {run.root}" + ("" if entries else " (dry run: nothing submitted)"))
    if entries:
        print(f"watch it with: relax-hpc status {run.root} --watch")
    sys.stdout.flush()
