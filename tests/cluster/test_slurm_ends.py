"""Groups that always fail: the run ends by itself, and everything of it, also what has not even
begun.

The engine is `simulated`: a rollout stub in SGLang's place, which env/test.sh --all puts in.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_NO_PROGRESS
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.sandbox.config_files import MAILS
from relax_hpc.cluster.supervise.requests import read_stop_request
from tests.cluster.slurm_runs import START_S, TWO_GROUPS, submitted
from tests.helpers.run_helpers import ALL, merged
from tests.helpers.slurm_sandbox import requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

HELD = {"resources": {"nodes": 1, "options": {"hold": ""}}}


@pytest.mark.parametrize("layout", ["het", "jobs"] if ALL else ["het"])
def test_a_crash_loop_ends_the_run(layout: str, sandbox: Sandbox, tmp_path: Path) -> None:
    crashes = {
        "groups": {"rollout": crashing(tmp_path, nodes=2)},
        "liveness": {"max_restarts": 2},
        "site": {"options": {"mail-type": "END,FAIL"}},
    }
    with submitted(sandbox, tmp_path, layout, merged(TWO_GROUPS, crashes)) as live:
        asked = live.wait_until(lambda: read_stop_request(live.run), "it gives up", START_S)
        assert asked["code"] == EXIT_NO_PROGRESS and "max_restarts" in asked["reason"]
        live.assert_nothing_left()
        live.survived("a crash loop: it ends with code 93 and gives everything back")
        assert (live.incarnations("rollout"), live.incarnations("actor")) == (3, 1)
        ended = sandbox.client("scontrol", "show", "job", live.jobs[0])
        assert f"ExitCode={EXIT_NO_PROGRESS}:0" in ended
        # Slurm's mail says once what has happened: its subject has the name of the job.
        mails = (sandbox.folder / MAILS).read_text().splitlines()
        (mail,) = [subject for subject in mails if any(job in subject for job in live.jobs)]
        assert ":failed:_rollout:_ended_3_times" in mail and "ExitCode 93" in mail


def test_a_crash_loop_ends_what_is_queued_too(sandbox: Sandbox, tmp_path: Path) -> None:
    groups = {"rollout": crashing(tmp_path, nodes=1), "actor": HELD}
    one = {
        "rollout": {"replicas": 1},
        "actor": {"parallel": {"data": 1}},
        "liveness": {"max_restarts": 1},
    }
    with submitted(sandbox, tmp_path, "jobs", one | {"groups": groups}) as live:
        asked = live.wait_until(lambda: read_stop_request(live.run), "it gives up", START_S)
        assert asked["code"] == EXIT_NO_PROGRESS and asked["reason"].startswith(
            "rollout: ended 2 times"
        )
        live.assert_nothing_left()
        assert (live.incarnations("rollout"), live.incarnations("actor")) == (2, 0)


def crashing(folder: Path, nodes: int) -> dict[str, Any]:
    """A group whose roles fail at once; what looks at their nodes before does not, which would find
    it out."""
    crash = "import os, sys\nif '--role' in sys.orig_argv:\n    os._exit(7)\n"
    (folder / "sitecustomize.py").write_text(crash)
    path = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))
    return {"env": {"PYTHONPATH": path}, "resources": {"nodes": nodes}}
