"""Everything that the page shows, read from a run directory, during a run and after its end."""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.metrics.read import load_metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.supervise.launch_records import all_ended
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.roster import latest_card
from relax_hpc.ops.observe.sample_reading import valid_samples
from relax_hpc.ops.observe.status import status
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.operations import ExternalEngine, Operation
from relax_hpc.queue.records import OBSERVER_INCARNATION
from relax_hpc.rollout.sample_log import Sample, read_newest_samples
from relax_hpc.service.page.events import recent_events
from relax_hpc.service.page.state import describe_run, without_controls

SAMPLES_OF_KIND = 12
"""Samples of training on the page, and samples of evaluations, at most."""
SAMPLE_BYTES = 4 << 20
"""Bytes of all samples of the page, at most. Pictures take most of them."""
_FINISHED_OPERATIONS = 5
_HUB_S = 3.0
"""Seconds to wait for the hub's operations."""
_MAX_READ = 2000
"""Samples of one file that are read, at most. Before a long evaluation, there may be older samples
of training."""


def take_snapshot(run: RunDir, slurm: Slurm | None = None) -> dict[str, Any]:
    """{state, samples} of ``run``. ConfigError: there is no run."""
    operations, external = _ask_hub(run)
    state = take_state(run, slurm, None, operations, external)
    return {"state": state, "samples": newest_samples(run)}


def take_state(
    run: RunDir,
    slurm: Slurm | None = None,
    hub: Mapping[str, Any] | None = None,
    operations: Sequence[Operation] = (),
    external: Sequence[ExternalEngine] = (),
) -> dict[str, Any]:
    """State of ``run``, see `describe_run`. ConfigError: there is no run.

    ``hub``: its status as a message, empty if it does not answer; None: it is asked.
    """
    metrics = load_metrics(run.root)
    run_status = status(run, slurm=slurm, rows=metrics.rows, hub=hub)
    events = recent_events(run, load_resolved(run.root), run_status["groups"], metrics)
    return describe_run(run_status, metrics, events, operations, external)


def _ask_hub(run: RunDir) -> tuple[Sequence[Operation], Sequence[ExternalEngine]]:
    """Operations and external engines; none if the hub of the run does not answer."""
    card = latest_card(run, "hub")
    if run.finished.exists() or card is None or not card.endpoint:
        return (), ()
    try:
        config = load_resolved(run.root)
        if all_ended(run, config, "hub"):
            return (), ()
        with QueueClient(run, config, "observer", OBSERVER_INCARNATION) as client:
            return ask_operations(client)
    except RelaxError:
        # Also if this user cannot read the token of the run. `status` names other errors.
        return (), ()


def ask_operations(client: QueueClient) -> tuple[Sequence[Operation], Sequence[ExternalEngine]]:
    """The newest operations, newest first, and external engines. RelaxError: the hub does not
    answer."""
    listing, presence = client.operations.list(timeout=_HUB_S), client.operations.present(_HUB_S)
    newest_first = sorted(listing.result(), key=lambda operation: -operation.created_at)
    unfinished = [operation for operation in newest_first if operation.is_unfinished]
    finished = [operation for operation in newest_first if not operation.is_unfinished]
    return [*unfinished, *finished[:_FINISHED_OPERATIONS]], presence.result().external


def newest_samples(run: RunDir) -> list[Sample]:
    """The newest samples of training and of evaluations, newest first.

    Their fates are unknown: those are in the journal, which is too long to be read for a page.
    """
    kinds: dict[bool, list[Sample]] = {False: [], True: []}
    for sample in valid_samples(read_newest_samples(run.samples, _is_enough)):
        kinds["eval" in sample].append(sample)
    newest = list[Sample]()
    for samples in kinds.values():
        newest += heapq.nlargest(SAMPLES_OF_KIND, samples, key=_written_at)
    return _within_limit(sorted(newest, key=_written_at, reverse=True))


def _is_enough(samples: Sequence[Sample]) -> bool:
    count = sum("eval" in sample for sample in samples)
    has_both = min(count, len(samples) - count) >= SAMPLES_OF_KIND
    return has_both or len(samples) >= _MAX_READ


def _written_at(sample: Sample) -> float:
    return sample["time"]


def _within_limit(samples: Iterable[Sample]) -> list[Sample]:
    """The first samples, with at most `SAMPLE_BYTES`, as a page shows them."""
    shown, size = list[Sample](), 0
    for sample in samples:
        sample.pop("recording", None)
        size += len(json.dumps(sample))
        if size > SAMPLE_BYTES:
            break
        shown.append(without_controls(sample))
    return shown
