"""A whole run whose roles are in containers: real ones, made by a program that takes Apptainer's
words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.sandbox.processes import command_line
from tests.cluster.slurm_runs import START_S, TWO_GROUPS, submitted
from tests.effort import effort
from tests.helpers.containers import PYTHON, install, make_image
from tests.helpers.run_helpers import merged
from tests.helpers.slurm_sandbox import requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi", "bubblewrap")
requires_sandbox()

pytestmark = pytest.mark.slurm
WHOLE = pytest.mark.skipif(
    not effort(0, 1), reason="one more whole run: env/test.sh --all, or RELAX_WHOLE=1"
)


@pytest.mark.parametrize("layout", ["het", pytest.param("jobs", marks=WHOLE)])
def test_a_run_inside_of_containers_survives_a_kill(
    layout: str, sandbox: Sandbox, tmp_path: Path
) -> None:
    program, image = install(tmp_path / "bin"), make_image(tmp_path / "image")
    (tmp_path / "local").mkdir()
    container = {
        "runtime": "apptainer",
        "program": str(program),
        "image": str(image),
        "python": PYTHON,
    }
    site = {
        "container": container,
        "local_dir": str(tmp_path / "local"),
        "mpi": {"launcher": "pmi2", "library": "wheel"},
    }
    over = merged(TWO_GROUPS, {"steps": 9, "site": site})
    with submitted(sandbox, tmp_path, layout, over) as live:
        # A start in a container takes longer than one outside.
        live.patience_s = 2 * START_S
        live.wait_for_step(3)
        assert all(PYTHON in command_line(process) for process in live.processes("actor"))
        live.kill("actor")
        live.finish()
        live.assert_nothing_left()
    calls = [json.loads(line) for line in (tmp_path / "bin" / "calls").read_text().splitlines()]
    assert any("relax_hpc.cluster.slurm.node_probe" in call for call in calls)
    assert {call[call.index("--role") + 1] for call in calls if "--role" in call} == {
        "actor",
        "rollout",
    }
