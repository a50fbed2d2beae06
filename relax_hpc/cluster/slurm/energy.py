"""Energy of jobs by Slurm's accounting: `ConsumedEnergy`, where the site measures it.

Slurm counts the energy of whole nodes for each step. Steps of a group overlap, so their energies
must not be added. Source: https://slurm.schedmd.com/sacct.html, read on 2026-11-27.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Sequence

from relax_hpc.cluster.slurm.commands import clean_environment
from relax_hpc.cluster.slurm.program_output import run_program

_SACCT_S = 5.0
"""Seconds for the accounting database to answer. `relax-hpc report` does not wait longer."""
_MAX_JOBS = 500
"""Newest jobs of a run that are asked for."""
_FIELDS = ("JobIDRaw", "JobName", "ConsumedEnergyRaw")


def read_job_energies(jobs: Sequence[str]) -> dict[str, float]:
    """Joules by job, for ids of jobs and of components (plain numbers).

    A job is missing if it has none, as when the site does not measure energy. Empty: there is no
    accounting, or it does not answer.
    """
    if not jobs or shutil.which("sacct") is None:
        return {}
    # --duplicates: the earlier runs of a requeued job count, too.
    command = ["sacct", "--noheader", "--parsable2", "--duplicates"]
    command += [f"--jobs={','.join(jobs[-_MAX_JOBS:])}", f"--format={','.join(_FIELDS)}"]
    try:
        done = run_program(command, _SACCT_S, clean_environment())
    except (OSError, subprocess.TimeoutExpired):
        return {}
    return sum_energies(done.stdout.splitlines()) if done.returncode == 0 else {}


def sum_energies(lines: Iterable[str]) -> dict[str, float]:
    """Joules by job from lines `id|name|joules` of sacct, in which the line of a job precedes those
    of its steps.

    >>> lines = ["7|actor|", "7.extern|extern|900", "7.0|actor.actor.i000001|500"]
    >>> sum_energies([*lines, "7.1|actor.actor.i000002|300"])
    {'7': 900.0}
    """
    energies: dict[str, float] = defaultdict(float)
    job, steps = "", list[tuple[str, str, float]]()
    for line in [*lines, "end||"]:
        fields = line.strip().split("|")
        if len(fields) < len(_FIELDS):
            continue
        number, name, joules = fields[0], "|".join(fields[1:-1]), fields[-1]
        if "." in number:
            steps.append((number, name, float(joules) if joules.isdigit() else 0.0))
            continue
        if steps and job:
            energies[job] += _job_energy(steps)
        job, steps = number, []
    return {name: joules for name, joules in energies.items() if joules}


def _job_energy(steps: Iterable[tuple[str, str, float]]) -> float:
    """Joules of a job from (id, name, joules) of its steps.

    Each of three values is at most the energy of the job, so the largest one counts: that of the
    step `extern`, which covers the whole job if Slurm measures it; that of the step `batch`, which
    covers the first node; and the sum over incarnations, whose steps run at the same time.
    """
    whole, incarnations = 0.0, defaultdict[str, float](float)
    for number, name, joules in steps:
        if number.endswith((".extern", ".batch")):
            whole = max(whole, joules)
            continue
        group, _, rest = name.partition(".")
        key = f"{group}.{rest.rpartition('.')[2]}"
        incarnations[key] = max(incarnations[key], joules)
    return max(whole, sum(incarnations.values()))
