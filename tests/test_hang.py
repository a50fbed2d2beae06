"""A role that lives but does not beat is taken for dead, and the run goes on."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.audit import audit
from tests.requirements import requires
from tests.run_helpers import running

requires("mpi", "torch", "megatron", "transformers")

LEASE_S = 3.0
HANGING = {"steps": 40, "liveness": {"beat_s": 0.2, "lease_s": LEASE_S, "stop_timeout_s": 5.0}}


def test_a_stopped_role_is_replaced_after_its_lease(tmp_path: Path) -> None:
    with running(tmp_path, HANGING) as run:
        run.wait_for_step(2, 120)
        others = {role: [process.pid for process in run.processes(role)] for role in ("rollout", "actor", "actor_fwd")}
        run.processes("reference")[0].send_signal(signal.SIGSTOP)
        run.wait_until(lambda: run.epochs("reference") == 2, "reference was started again", 10 * LEASE_S)
        assert {role: [process.pid for process in run.processes(role)] for role in others} == others
        run.finish(200)
    assert "has not beaten for" in run.output.read_text()
    assert not audit(run.run).problems
