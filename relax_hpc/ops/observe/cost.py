"""Cost of a run by group: hours of its units, energy, CPU time and memory, per token and per point
of the held-out score."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_hpc.base.metrics.accounting import Interval
from relax_hpc.base.metrics.resource_samples import GpuUse, Sample, read_last_samples
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.energy import read_job_energies
from relax_hpc.cluster.supervise.incarnations import PastIncarnation, held_intervals, unit_of
from relax_hpc.cluster.supervise.launch_records import newest_launches
from relax_hpc.config import Config

_HOUR_S, _J_PER_KWH = 3600.0, 3.6e6
POINT = 0.01
"""A point of a held-out score."""


def measure_cost(
    run: RunDir,
    config: Config,
    incarnations: Sequence[PastIncarnation],
    window: Interval,
    rows: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    """Cost in ``window``, seconds of the wall clock, as JSON values. Unknown values are None.

    Energy, CPU time and GPU errors are counted for whole incarnations; an incarnation that lies
    partly in the window counts with its share of the time. ``rows``: the metrics in the window.
    """
    shares = _shares_of(incarnations, window)
    hours = _hours_by_group(incarnations, window)
    energies = _slurm_energies(run, shares) if config.layout != "local" else {}
    groups = {}
    for group in hours:
        groups[group] = {"hours": hours[group], "slurm_kwh": energies.get(group)}
        groups[group] |= _sampled(run, group, shares)
    tokens = sum(row.get("perf/trained_tokens", 0.0) for row in rows)
    total_hours = sum(hours.values())
    kwh = total_kwh(groups.values())
    return {
        "unit": unit_of(config),
        "groups": groups,
        "hours": total_hours,
        "kwh": kwh,
        "trained_tokens": tokens,
        "hours_per_million_tokens": _ratio(total_hours, tokens / 1e6),
        "kwh_per_million_tokens": _ratio(kwh, tokens / 1e6),
        "scores": [
            score
            | {
                "hours_per_point": _ratio(total_hours, score["points"]),
                "kwh_per_point": _ratio(kwh, score["points"]),
            }
            for score in _scores(config, rows)
        ],
    }


def total_kwh(groups: Iterable[Mapping[str, Any]]) -> float | None:
    """Energy of all groups: Slurm's, which is of whole nodes, or else that of the GPUs. None:
    neither was measured."""
    values = []
    for group in groups:
        measured = [group[name] for name in ("slurm_kwh", "gpu_kwh") if group[name] is not None]
        values += measured[:1]
    return sum(values) if values else None


def _hours_by_group(incarnations: Sequence[PastIncarnation], window: Interval) -> dict[str, float]:
    """Unit-hours that each group held."""
    hours: dict[str, float] = defaultdict(float)
    for incarnation, (began, ended) in held_intervals(incarnations):
        seconds = max(0.0, min(ended, window[1]) - max(began, window[0]))
        hours[incarnation.group] += incarnation.units * seconds / _HOUR_S
    return dict(hours)


def _shares_of(
    incarnations: Sequence[PastIncarnation], window: Interval
) -> dict[tuple[str, int], float]:
    """Share of the time of each incarnation that lies in the window."""
    shares = {}
    for incarnation in incarnations:
        began, ended = incarnation.began, incarnation.ended
        inside = max(0.0, min(ended, window[1]) - max(began, window[0]))
        share = inside / (ended - began) if ended > began else 0.0
        shares[incarnation.group, incarnation.incarnation] = share
    return shares


def _sampled(run: RunDir, group: str, shares: Mapping[tuple[str, int], float]) -> dict[str, Any]:
    """Totals of the samples of a group's processes."""
    cpu_s = joules = busy_s = gpu_s = 0.0
    peak_bytes, errors = 0, Counter[str]()
    for (name, number), share in shares.items():
        if name != group or not share:
            continue
        samples = read_last_samples(run.logs(group, number))
        cpu_s += share * sum(sample.cpu_s for sample in samples.values())
        peaks = [sample.peak_memory_bytes for sample in samples.values()]
        peak_bytes = max(peak_bytes, sum(peaks))
        for gpu in _distinct_gpus(samples.values()):
            joules += share * gpu.energy_j
            busy_s += share * gpu.busy_s
            gpu_s += share * gpu.seconds
            errors.update(gpu.errors)
    return {
        "cpu_hours": cpu_s / _HOUR_S,
        "peak_memory_bytes": peak_bytes,
        "gpu_kwh": joules / _J_PER_KWH if gpu_s else None,
        "gpu_utilization": busy_s / gpu_s if gpu_s else None,
        "gpu_errors": dict(errors),
    }


def _distinct_gpus(samples: Iterable[Sample]) -> list[GpuUse]:
    """Each GPU once: roles of a group that share a GPU have sampled the same one."""
    gpus: dict[tuple[str, str], GpuUse] = {}
    for sample in samples:
        for gpu in sample.gpus:
            key = sample.node, gpu.uuid
            if key not in gpus or gpus[key].seconds < gpu.seconds:
                gpus[key] = gpu
    return list(gpus.values())


def _slurm_energies(run: RunDir, shares: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Energy of each group by Slurm, kWh. A group is missing if Slurm has not measured it.

    The energy of a job is that of the groups on its nodes, in equal parts. A hub that shares nodes
    with other groups gets none of it.
    """
    groups_of_job: dict[str, dict[str, float]] = defaultdict(dict)
    for group in {name for name, _ in shares}:
        for number, launch in newest_launches(run, group):
            if launch.job:
                share = shares.get((group, number), 0.0)
                former_share = groups_of_job[launch.job].get(group, 0.0)
                groups_of_job[launch.job][group] = max(former_share, share)
    energies: dict[str, float] = defaultdict(float)
    for job, joules in read_job_energies(sorted(groups_of_job, key=int)).items():
        groups = groups_of_job.get(job, {})
        receivers = [group for group in groups if group != "hub"] or list(groups)
        for group in receivers:
            energies[group] += groups[group] * joules / len(receivers) / _J_PER_KWH
    return dict(energies)


def _scores(config: Config, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """First and last held-out score of each set in ``rows``, and the points gained."""
    metric = "loss" if config.algorithm.from_file else config.eval.metric
    sign = -1.0 if metric == "loss" else 1.0
    scores = []
    for name in config.data.eval:
        tag = f"eval/{name}/{metric}"
        values = [row[tag] for row in rows if math.isfinite(row.get(tag, math.nan))]
        if len(values) >= 2:
            points = sign * (values[-1] - values[0]) / POINT
            scores.append({"tag": tag, "first": values[0], "last": values[-1], "points": points})
    return scores


def _ratio(value: float | None, divisor: float) -> float | None:
    """``value`` per ``divisor``; None: unknown, or nothing was gained."""
    return value / divisor if value is not None and divisor > 0 else None
