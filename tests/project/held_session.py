"""Tests that hold what a session can hold and wait to be killed with it. `test_guardian.py` runs
them in a pytest.

Each writes a JSON file into the folder that RELAX_HELD names once it holds everything.
"""

from __future__ import annotations

import json
import os
import subprocess
import threading
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.training.weights.node_cache import staging_root
from tests.guardian import FOLDER, MARK
from tests.helpers.run_helpers import LIGHT, merged, running
from tests.helpers.slurm_sandbox import private_sandbox
from tests.plain_user import plain_user

START_S = 100.0


def hold(name: str, **held: str) -> None:
    """Write ``held`` to the record ``name``, and wait until this process is killed."""
    record = held | {"mark": os.environ[MARK], "session": os.environ[FOLDER]}
    target = Path(os.environ["RELAX_HELD"]) / f"{name}.json"
    partial = target.with_suffix(".partial")
    partial.write_text(json.dumps(record))
    partial.rename(target)
    threading.Event().wait()


def test_holds_daemons_a_user_and_memory(tmp_path: Path) -> None:
    with private_sandbox(nodes=1) as sandbox, plain_user() as user:
        # Neither the job nor the user's process has the session's mark.
        bare = {"PATH": os.environ["PATH"], "SLURM_CONF": str(sandbox.conf)}
        job = ["sbatch", "--output=/dev/null", "--wrap", "tail -f /dev/null"]
        subprocess.run(job, env=bare, stdout=subprocess.DEVNULL, check=True, timeout=START_S)
        subprocess.Popen(["sleep", "1000"], user=user.entry.pw_uid, env={})
        memory = SharedMemory(create=True, size=4096)
        staging = staging_root(RunDir(tmp_path / "run"))
        (tmp_path / "run").mkdir()
        (staging / "v1").mkdir(parents=True)
        hold("cheap", user=user.name, memory=f"/dev/shm/{memory.name}", staging=str(staging))


@pytest.mark.run
def test_holds_a_run(tmp_path: Path) -> None:
    with running(tmp_path, merged(LIGHT, {"steps": 1_000_000, "queue": {"keep_steps": 2}})) as live:
        live.wait_for_step(1, START_S)
        hold("run", user="", memory="", staging=str(staging_root(live.run)))
