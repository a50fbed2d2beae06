"""The hub's first process: the queue controller, and the only writer of metrics."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from relax_hpc.base.disk_waits import WriteRetry
from relax_hpc.base.metrics.resource_sampler import ResourceSampler
from relax_hpc.base.rundir import RunDir, sync_directory, write_json
from relax_hpc.config.groups import CONTROLLER
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.network import own_address
from relax_hpc.net.rendezvous.process import SignalFlag
from relax_hpc.net.rendezvous.roster import GroupCard, publish_card
from relax_hpc.net.tracker_processes import TrackerProcesses
from relax_hpc.queue.controller.save_clock import SaveClock
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.plan import Plan
from relax_hpc.roles.board import Board
from relax_hpc.roles.summary_process import SummaryProcess

_SYNCED_BY_WRITERS = ("checkpoints", "logs", "queue", "rendezvous", "tensorboard", "weights")
"""Folders of a run whose writers sync their files themselves."""
_SUMMARY_SHARE = 0.3
"""Share of liveness.stop_timeout_s in which the end of a long run may be summarised."""
_TRACKERS_SHARE = 0.5
"""Share of liveness.stop_timeout_s in which trackers may finish. After the whole time the
supervisor kills the hub."""


def make_durable(directory: RunDir) -> None:
    """Sync the files that were written before the run started. Without them the queue could not
    continue the run after a power loss."""
    for top, folders, files in os.walk(directory.root):
        if Path(top) == directory.root:
            folders[:] = [name for name in folders if name not in _SYNCED_BY_WRITERS]
        for path in [Path(top, name) for name in files if not name.startswith(".")]:
            # A file that this process may not read is not part of the run.
            with contextlib.suppress(PermissionError):
                if path.is_file():
                    sync_directory(path)
        sync_directory(Path(top))
    sync_directory(directory.journal.parent)


def run(directory: RunDir, config: Config, incarnation: int, stop: SignalFlag) -> bool:
    """Serve until the process is asked to stop. Return whether the run was finished by then."""
    durability = config.queue.durability
    durable = durability == "commit"
    if durable:
        make_durable(directory)
    address, lease_s = own_address(config, "hub"), config.liveness.lease_s
    controller = Controller(
        directory,
        Plan.from_config(config),
        incarnation,
        address,
        durability,
        lease_s=lease_s,
        gathers=True,
    )
    board = Board(directory.root, incarnation, config.steps, controller.state)
    board.log_settings(config)
    logs = directory.logs("hub", incarnation)
    resources = ResourceSampler(logs, CONTROLLER, 0, config.metrics.resources_s)
    board.own_metrics = resources.metrics
    trackers = TrackerProcesses(directory, config.metrics.trackers, logs, board.note_first_failure)
    unmarked = WriteRetry(directory.finished)
    summaries = SummaryProcess(directory)
    controller.service.on_report = board.report
    controller.service.on_show = board.show
    controller.service.on_first_failure = board.note_first_failure
    controller.service.on_resume = board.roll_back
    controller.service.save_clock = SaveClock(config.checkpoint)
    publish_card(directory, GroupCard("hub", incarnation, [], controller.endpoint))

    def should_end() -> bool:
        trackers.report_failures()
        summaries.poll(controller.journal.position.offset)
        done = controller.state.progress.finished() and not controller.stuck
        if done and not directory.finished.exists() and unmarked.is_due():
            dropped = dict(controller.state.counts.dropped)
            try:
                write_json(directory.finished, {"steps": config.steps, "dropped": dropped}, durable)
                unmarked.note_success()
            except OSError as error:
                unmarked.note_failure(error)
        return stop.is_set()

    controller.serve(until=should_end)
    controller.close()
    resources.close()
    summaries.close(
        controller.journal.position.offset, _SUMMARY_SHARE * config.liveness.stop_timeout_s
    )
    trackers.close(_TRACKERS_SHARE * config.liveness.stop_timeout_s)
    board.close()
    return controller.state.progress.finished()
