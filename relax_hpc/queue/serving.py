"""A controller in a thread of a process that does other work too: for tests, and for runs of one
process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.roster import GroupCard, claim_incarnation, publish_card
from relax_hpc.net.transport.sockets import wake_listener
from relax_hpc.queue.controller.server import Controller
from relax_hpc.queue.plan import Plan

_END_S = 10.0


@contextmanager
def serving(run: RunDir, config: Config, host: str = "127.0.0.1") -> Iterator[Controller]:
    """Serve ``run`` in a thread of this process until the block ends. Clients of all processes find
    it.

    The controller continues from the journal of an earlier controller, and fences that one. At the
    end, the error that ended the thread early is raised, such as FencedError if another controller
    has taken over.
    """
    run.create()
    incarnation = retry_write(run.rendezvous("hub"), lambda: claim_incarnation(run, "hub"))
    controller = Controller(
        run, Plan.from_config(config), incarnation, host, config.queue.durability
    )
    publish_card(run, GroupCard("hub", incarnation, [], controller.endpoint))
    stop = threading.Event()
    with ThreadPoolExecutor(1, thread_name_prefix="queue-controller") as pool:
        served = pool.submit(controller.serve, stop.is_set)
        try:
            yield controller
        finally:
            stop.set()
            # It looks whether it is to end.
            wake_listener(controller.endpoint, _END_S)
    controller.close()
    served.result(_END_S)
