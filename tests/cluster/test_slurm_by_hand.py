"""The script of a size, as `slurm/` ships it: submitted by hand, and run inside an allocation that
is there already."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.slurm.layout import components
from relax_hpc.cluster.slurm.render import render_size
from relax_hpc.config import load
from tests.cluster.slurm_runs import ENGINE_START_S, OVER, START_S, SlurmRun
from tests.helpers.run_helpers import ALL, engine_of, merged, with_engine, write_config
from tests.helpers.slurm_sandbox import requires_sandbox
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

SIZE = "configs/clusters/small.yaml"
FEW = {"steps": 12, "rollout": {"replicas": 1}, "checkpoint": {"every": 3}}
PARTS = {
    "hub": {"resources": {"nodes": 2}},
    "reference": None,
    "actor": {"resources": {"nodes": 2}},
}


def submit(script: Path, environment: dict[str, str]) -> None:
    subprocess.run(["sbatch", script], check=True, cwd=script.parent, env=environment, timeout=30)


def allocate(script: Path, environment: dict[str, str]) -> None:
    """The same components, asked for by `salloc`."""
    words: list[str] = []
    for part in components(load([script.parent / SIZE])):
        shape = [
            f"--nodes={part.nodes}",
            f"--ntasks-per-node={part.tasks_per_node}",
            "--exclusive",
            "--no-kill",
        ]
        words += [
            *([":"] if words else []),
            *shape,
            f"--cpus-per-task={part.cpus_per_task}",
            "--time=60",
        ]
    subprocess.run(
        ["salloc", *words, "bash", script],
        check=True,
        cwd=script.parent,
        env=environment,
        timeout=300,
    )


@pytest.mark.skipif(not ALL, reason="two more whole runs: env/test.sh --all")
@pytest.mark.parametrize("begin", [submit, allocate])
def test_a_script_by_hand_runs_to_its_end(
    begin: Callable[..., None], sandbox: Sandbox, tmp_path: Path
) -> None:
    engine, root = engine_of("simulated"), tmp_path / "run"
    run = merged(
        merged(OVER, with_engine(engine)),
        FEW | {"run_dir": str(root), "groups": {"reference": None}},
    )
    run["groups"] = {"reference": None}
    size = tmp_path / SIZE
    size.parent.mkdir(parents=True)
    write_config(size, {"layout": "het", "groups": PARTS, "actor": OVER["actor"]}, {})
    script = tmp_path / "small.sbatch"
    script.write_text(render_size(load([size]), SIZE))
    files = {
        "RELAX_CONFIG": str(write_config(tmp_path / "run.yaml", run)),
        "RELAX_SITE": str(sandbox.site),
        "RELAX_HOME": str(tmp_path),
        "RELAX_PYTHON": sys.executable,
    }
    begin(script, sandbox.environment() | files)
    patience_s = ENGINE_START_S if engine == "sglang" else START_S
    live = SlurmRun(sandbox, RunDir(root), [], "het", engine, patience_s)
    live.wait_until(live.run.finished.exists, "the run finished", 2 * patience_s)
    live.finish()
    live.assert_nothing_left()
    live.survived(f"none: the script of a size, by hand ({begin.__name__})")
