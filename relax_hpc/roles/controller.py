"""The hub's first process: the queue controller, and the only writer of metrics."""

from __future__ import annotations

import threading

from relax_hpc.config.schema import Config
from relax_hpc.rendezvous.roster import Card, publish_card
from relax_hpc.roles.board import Board
from relax_hpc.rundir import RunDir, write_json
from relax_hpc.transfer_queue.controller import Controller
from relax_hpc.transfer_queue.plan import Plan


def run(directory: RunDir, config: Config, epoch: int, stop: threading.Event) -> bool:
    """Serve until asked to stop; whether the run was finished by then."""
    controller = Controller(directory, Plan.of(config), epoch)
    board = Board(directory.root, epoch, config.steps, controller.state)
    controller.on_report = board.report
    controller.on_resume = board.rolled_back
    publish_card(directory, Card("hub", epoch, [], controller.endpoint))

    def ended() -> bool:
        if controller.state.finished() and not directory.finished.exists():
            write_json(directory.finished, {"steps": config.steps, "dropped": dict(controller.state.dropped)})
        return stop.is_set()

    controller.serve(until=ended)
    controller.close()
    board.close()
    return controller.state.finished()
