"""`relax-hpc submit`: create the run directory, write the batch scripts, and submit them."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict

from relax_hpc.base.errors import EXIT_DONE, ConfigError, RelaxError
from relax_hpc.base.rundir import RunDir, write_atomic
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.expedited_requeue import with_expedited_requeue
from relax_hpc.cluster.slurm.layout import components, gpu_hours, node_hours
from relax_hpc.cluster.slurm.render import render, render_group
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.cluster.slurm.successors import Successors
from relax_hpc.cluster.supervise.attempts import latest_attempt, new_attempt
from relax_hpc.commands.run_setup import prepare_run_dir
from relax_hpc.commands.snapshot import take_snapshot
from relax_hpc.config import Config
from relax_hpc.ops.doctor.doctor import diagnose


def submit(config: Config, resume: bool, dry_run: bool, form: str = "") -> int:
    """Submit a run, or with ``dry_run`` only write its files. ``form``: "json" or "parsable" for
    output that programs read."""
    # A layout that is not possible must fail before the run directory is created.
    render(config)
    if not dry_run:
        config = with_expedited_requeue(config, Slurm())
        _check_site(config)
    run, config = prepare_run_dir(config, resume)
    if run.finished.exists():
        print(f"{run.root}: the run is finished already; to continue it, resume with more --steps")
        return EXIT_DONE
    take_snapshot(run)
    for name, text in render(config).items():
        write_atomic(run.submit / name, text.encode())
    entries: list[Submission] = []
    if not dry_run:
        new_attempt(run)
        entries = _submit_all(run, config, Slurm())
    _print_summary(run, config, entries, form)
    return EXIT_DONE


def _check_site(config: Config) -> None:
    """Print the findings of `relax-hpc doctor` to standard error. ConfigError if one is an
    error."""
    findings = diagnose(config, Slurm())
    errors = [finding.text for finding in findings if finding.severity == "error"]
    warnings = [f"warning: {item.text}" for item in findings if item.severity == "warning"]
    # The first error is in the ConfigError.
    for text in warnings + errors[1:]:
        print(f"relax-hpc: {text}", file=sys.stderr)
    if errors:
        raise ConfigError(errors[0])


def _submit_all(run: RunDir, config: Config, slurm: Slurm) -> list[Submission]:
    """Submit all jobs. If one submission fails, cancel the jobs before it."""
    ledger, entries = Ledger(run), []
    submit_jobs = _submit_separate_jobs if config.layout == "jobs" else _submit_run_job
    try:
        for entry in submit_jobs(run, config, slurm):
            ledger.add(entry)
            entries.append(entry)
    except RelaxError:
        for entry in entries:
            with contextlib.suppress(RelaxError):
                slurm.cancel(entry.job)
        raise
    return entries


def _submit_separate_jobs(run: RunDir, config: Config, slurm: Slurm) -> Iterator[Submission]:
    """Submit a separate job for each group. Jobs of other groups start after the job of the hub,
    because they would only wait for it."""
    attempt = latest_attempt(run)
    hub = slurm.submit(run.submit / "hub.sbatch")
    yield Submission(hub, "group", "hub", attempt=attempt)
    for name in config.groups:
        if name != "hub":
            job = slurm.submit(run.submit / f"{name}.sbatch", f"--dependency=after:{hub}")
            yield Submission(job, "group", name, attempt=attempt)
    yield from _successors(run, config, slurm, hub)


def _submit_run_job(run: RunDir, config: Config, slurm: Slurm) -> Iterator[Submission]:
    """Submit the job of all groups. If nodes may not call sbatch, also submit its successors and
    the spare jobs of the groups."""
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
    """Submit all successors of ``job``, each after the one before, if nodes may not call sbatch."""
    if config.site.sbatch_on_nodes:
        return
    followers = Successors(run, config, slurm, latest_attempt(run))
    for _ in range(config.slurm.successors):
        entry = followers.submit(job)
        job = entry.job
        yield entry


def max_successors(config: Config) -> int:
    """Number of jobs that may follow the job of the run if it is not finished at the time limit."""
    return config.slurm.successors if config.layout == "het" else 0


def cost_line(config: Config) -> str:
    """Line about the hours that a run requests until the first time limit, and about later jobs."""
    gpus, nodes, followers = gpu_hours(config), node_hours(config), max_successors(config)
    line = f"asks for {gpus:.1f} GPU-hours ({nodes:.1f} node-hours) at most"
    if config.layout == "jobs":
        return (
            f"{line} until the first time limit; the jobs are then requeued until the run is "
            "finished"
        )
    if not followers:
        return line
    jobs = followers + 1
    total = f"{gpus * jobs:.1f} GPU-hours ({nodes * jobs:.1f} node-hours)"
    return (
        f"{line} in one job; up to {followers} jobs follow until the run is finished "
        f"(slurm.successors): {total} at most"
    )


def _print_summary(run: RunDir, config: Config, entries: list[Submission], form: str) -> None:
    hours = {"gpu_hours": round(gpu_hours(config), 1), "node_hours": round(node_hours(config), 1)}
    if form == "json":
        counts = {"successors": max_successors(config)}
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
    for job in components(config):
        gpus = f"{job.gpus_per_node} GPUs" if job.gpus_per_node else "CPU"
        print(f"{' + '.join(job.groups):<20} {job.nodes:>4} nodes  {gpus:<7} {job.time}")
    print(cost_line(config))
    for entry in entries:
        print(f"submitted job {entry.job} ({entry.group or entry.kind})")
    print(f"run directory {run.root}" + ("" if entries else " (dry run: nothing submitted)"))
    if entries:
        print(f"watch it with: relax-hpc status {run.root} --watch")
    sys.stdout.flush()
