"""Look at the nodes of an allocation before groups start on them, and remember those that fail."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Sequence

from relax_hpc.config import load_resolved
from relax_hpc.config.groups import group_of
from relax_hpc.launch.slurm.container import role_python
from relax_hpc.launch.slurm.preflight import BadNodes, excluded
from relax_hpc.launch.slurm.steps import StepLauncher, step_environment
from relax_hpc.rundir import RunDir

_DEADLINE_S, _END_S = 60.0, 5.0


def check_nodes(launcher: StepLauncher, names: Sequence[str]) -> dict[str, str]:
    """Run the pre-flight on all nodes of the groups ``names`` at once; of each group that must not start there, why.

    Failing nodes are written to the run's list of bad nodes.
    """
    steps = {name: _start(launcher, name) for name in names}
    deadline = time.monotonic() + _DEADLINE_S
    return {name: reason for name, step in steps.items() if (reason := _judge(launcher, name, step, deadline))}


def exclude_option(run: RunDir, chosen: str = "", avoid: str = "") -> list[str]:
    """`--exclude` for sbatch with the run's repeat offenders and node ``avoid``, beside those that the user has
    ``chosen``, which stand in the script too; nothing if they are all."""
    names = [name for name in (avoid, *excluded(run)) if name]
    return [f"--exclude={','.join([chosen, *names] if chosen else names)}"] if names else []


def _start(launcher: StepLauncher, name: str) -> subprocess.Popen:
    config, run, place = load_resolved(launcher.run.root, name), launcher.run, launcher.allocation.places[name]
    group = group_of(config, name)
    words = [role_python(config), "-m", "relax_hpc.launch.slurm.preflight", "--run_dir", str(run.root)]
    if config.model.device == "cuda" and group.resources.gpus_per_node:
        words += ["--gpus", str(group.resources.gpus_per_node)]
    if interface := group.interface or config.site.interface:
        words += ["--interface", interface]
    srun = [*launcher.place_words(place), "--mpi=none", "--ntasks-per-node=1", f"--ntasks={place.nodes}"]
    return subprocess.Popen(
        [*srun, "--export=ALL", "--job-name=preflight", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=step_environment(config, name),
        start_new_session=True,
    )


def _judge(launcher: StepLauncher, name: str, step: subprocess.Popen, deadline: float) -> str:
    """Why ``name`` must not start on its nodes; empty if all of them are well."""
    try:
        output, _ = step.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        step.kill()
        output, _ = step.communicate(timeout=_END_S)
    reports = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    if not reports:
        # Slurm did not start it, which says nothing about the nodes; the group's own start will show.
        print(f"{name}: no pre-flight: {' '.join(output.split())[-200:]}", flush=True)
        return ""
    bad = {report["node"]: report["problems"] for report in reports if not report["ok"]}
    silent = [node for node in launcher.nodes_of(name) if node not in {report["node"] for report in reports}]
    bad |= {node: ["no answer to the pre-flight"] for node in silent}
    for node, problems in bad.items():
        BadNodes(launcher.run).add(node, "preflight", problems)
    return "; ".join(f"{node}: {', '.join(problems)}" for node, problems in bad.items())
