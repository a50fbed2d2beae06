"""A whole run of a user without rights: their own sandbox, a heterogeneous job, a rank killed in
it, the end.

Its ranks meet through the MPI that came with the packages, by pmi2; the other runs use the
system's, by pmix. Model and environment are copied to what stands for the nodes' own disks; in
`env/test.sh --all` gigabytes. The engine is `simulated`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.errors import EXIT_DONE
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox import cluster
from tests.cluster.slurm_runs import START_S, SlurmRun
from tests.effort import effort
from tests.helpers.run_helpers import merged, with_engine, write_config
from tests.helpers.slurm_sandbox import QUICK, requires_sandbox
from tests.plain_user import PlainUser, plain_user
from tests.requirements import requires

requires("torch", "megatron", "transformers", "mpi")
requires_sandbox()

pytestmark = pytest.mark.slurm

OVER = {
    "steps": 8,
    "max_staleness": 1,
    "checkpoint": {"every": 3},
    "site": {"mpi": {"launcher": "pmi2", "library": "wheel"}, "stage": ["model", "environment"]},
    "actor": {"parallel": {"data": 2}, "forward": ["actor_fwd"]},
    "groups": {
        "reference": None,
        "actor_fwd": None,
        "hub": {"resources": {"nodes": 2}},
        "rollout": {"resources": {"nodes": 1}},
    },
}


def call(user: PlainUser, *words: str | Path, slurm: Path | None = None) -> str:
    """What a command of the project prints; it succeeds."""
    done = user.run(user.python, "-m", *words, slurm=slurm)
    assert done.returncode == EXIT_DONE, (
        f"{words}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    )
    return done.stdout


def test_a_plain_user_runs_it_all() -> None:
    with plain_user(small=bool(effort(1, 0))) as user:
        folder, root, disk = user.home / "slurm", user.home / "run", user.home / "disk"
        options = [f"--{name}={value}" for name, value in QUICK.items()]
        call(user, "relax_hpc", "sandbox", "up", folder, "--nodes", "5", *options)
        sandbox = cluster.load(folder)
        try:
            over = merged(with_engine("simulated"), {"site": {"local_dir": str(disk)}})
            config = write_config(user.home / "run.yaml", merged(OVER, over))
            words = [
                "--config",
                sandbox.site,
                "--config",
                config,
                "--run_dir",
                root,
                "--layout",
                "het",
                "--parsable",
            ]
            # Its environment is copied first.
            live = SlurmRun(sandbox, RunDir(root), [], "het", "simulated", patience_s=3 * START_S)
            live.jobs = call(user, "relax_hpc", "submit", *words, slurm=sandbox.conf).split()
            live.wait_for_step(2)
            assert all(Path(p.cmdline()[0]).is_relative_to(disk) for p in live.processes("actor"))
            live.kill("actor", 1)
            live.finish()
            assert {path.owner() for path in root.rglob("*")} == {user.name}
            assert live.incarnations("actor") == 2, live.story()
            call(user, "relax_hpc", "sandbox", "down", folder)
        finally:
            cluster.down(folder)
