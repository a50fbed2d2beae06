"""Settings of the autoscaler, which changes the number of rollout engines of a running run."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class AutoscalerConfig:
    """Policy of the autoscaler. `service.min_engines` and `service.max_engines` bound its targets.

    The start time in these settings is the median of the last starts of engines in this run, from
    the request to the first service, and includes the time in Slurm's queue.
    """

    enabled: bool = False
    """Whether the autoscaler changes the number of engines. It needs `service.max_engines`. `POST
    /autoscaler/enable` switches it during a run."""
    dry_run: bool = False
    """Whether the autoscaler only explains its decisions, in `GET /autoscaler/status` and in
    logs/autoscaler.jsonl, and changes nothing."""
    evaluate_s: float = bounded(10.0, 0.1)
    """Seconds from one decision to the next."""
    window_s: float = bounded(60.0, 1.0)
    """Shortest window of observations in seconds. The window also covers two training steps and the
    generation of two prompt groups."""
    trainer_wait: float = bounded(0.05, 0.0, 1.0)
    """Share of the time for which the trainer has to wait for rollout before engines are added for
    a small difference between need and engines."""
    engine_wait: float = bounded(0.05, 0.0, 1.0)
    """Share of the engines' time for which they may wait for tickets, in the last third of the
    window, when engines are added. If engines wait more, further engines would wait too."""
    hysteresis: float = bounded(0.15, 0.0, 4.0)
    """Share by which the need has to exceed the engines to add some before the trainer waits."""
    headroom: float = bounded(0.15, 0.0, 4.0)
    """Share by which the target exceeds the need."""
    start_s: float = bounded(60.0, 1.0)
    """Start time of an engine in seconds, until a start has been measured."""
    cooldown: float = bounded(1.0, 0.0)
    """Multiples of the start time from any change to the next one."""
    cooldown_in: float = bounded(3.0, 0.0)
    """Multiples of the start time from an addition to the next removal, and for which fewer engines
    have to be enough before a removal."""
    max_change: int = bounded(0, 0)
    """Largest number of engines that one decision adds or removes. With 0 there is no limit."""
    kv_brake: float = bounded(0.9, 0.01, 1.0)
    """Largest share of the KV caches that may be in use after a removal, as calculated."""
    max_pending: int = bounded(2, 0)
    """Largest number of engines that wait in Slurm's queue because no node is idle."""
    max_start_wait_s: float = bounded(3600.0, 0.0)
    """Seconds until Slurm's expected start of a pending engine above which no further engines are
    requested."""
    time: str = ""
    """Time limit of the jobs that the autoscaler requests, as sbatch takes it. If it is empty, the
    limit of the rollout group applies."""
    time_min: str = ""
    """Shortest time limit that Slurm may give to these jobs, as `sbatch --time-min` takes it. Slurm
    then starts them in gaps of its schedule (backfill). If it is empty, Slurm does not shorten
    them."""
    payback: float = bounded(3.0, 0.0)
    """Multiples of the start time that the run's job must still have before engines are added."""
    budget_node_hours: float = bounded(0.0, 0.0)
    """Node-hours of all rollout engines over the whole run. When they are used up,
    `service.min_engines` remain. With 0 there is no limit."""
    budget_reserve_s: float = bounded(600.0, 1.0)
    """Seconds for which the rest of the budget must pay for all engines of a target."""
