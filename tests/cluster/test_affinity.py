"""Cores of ranks: no two roles of a group on one, each near its GPU; on real steps of a real Slurm
as well."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.sandbox.processes import until
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.steps import StepLauncher, step_environment
from relax_hpc.config import Config, load
from relax_hpc.config.groups import group_roles
from relax_hpc.config.load import dump
from relax_hpc.net.rendezvous.affinity import (
    Core,
    Rank,
    divide_cores,
    domains_of_gpus,
    list_ranks_of_node,
    numa_of_gpus,
    parse_cpu_list,
    read_cores,
)
from tests.cluster.test_render import SIZES, gpus_of, nodes_of
from tests.helpers.slurm_sandbox import private_sandbox

RANKS = st.lists(
    st.tuples(st.integers(1, 8), st.none() | st.integers(0, 3)), min_size=1, max_size=24
)


def node(sockets: int, each: int, threads: int = 1) -> list[Core]:
    """Cores whose second threads are numbered after all first ones, as on most machines."""
    total = sockets * each
    return [
        Core(tuple(number + total * thread for thread in range(threads)), number // each)
        for number in range(total)
    ]


@given(RANKS, st.integers(1, 4), st.integers(1, 40), st.integers(1, 2))
def test_shares_are_whole_cores_and_nobody_elses(
    wanted: list[tuple[int, int | None]], sockets: int, each: int, threads: int
) -> None:
    ranks = [Rank("r", number, weight, domain) for number, (weight, domain) in enumerate(wanted)]
    machine = node(sockets, each, threads)
    found = divide_cores(machine, ranks)
    if len(machine) < len(ranks):
        assert found == {}
        return
    assert set(found) == {("r", number) for number in range(len(ranks))}
    taken = [cpu for share in found.values() for cpu in share]
    assert all(found.values()) and len(taken) == len(set(taken))
    for core in machine:
        assert sum(bool(share & set(core.cpus)) for share in found.values()) <= 1


@pytest.mark.parametrize(
    "size", [size for size in SIZES if nodes_of(size) > 1], ids=lambda size: size.stem
)
def test_ranks_of_each_size_sit_on_the_socket_of_their_gpu(size: Path) -> None:
    config, gpus = load([size]), gpus_of(size)
    machine = node(2, 4 * gpus)
    for group in config.groups:
        if group == "hub":
            continue
        found = divide_cores(
            machine, list_ranks_of_node(config, group, domains_of_gpus(config, group, machine))
        )
        taken = [cpu for share in found.values() for cpu in share]
        assert len(taken) == len(set(taken)) and {role for role, _ in found} == set(
            group_roles(config, group)
        )
        for (role, rank), share in found.items():
            assert len(share) >= config.groups[group].resources.cpus_per_task
            if role != "rollout":
                assert {cpu // (4 * gpus) for cpu in share} == {rank // (gpus // 2)}, (
                    "local rank r has GPU r"
                )


def test_fewer_ranks_than_gpus_take_the_first_ones() -> None:
    groups = {"actor": {"resources": {"gpus_per_node": 8}}}
    config = load(
        [], {"layout": "jobs", "model.device": "cuda", "groups": groups, "actor.parallel.data": 2}
    )
    machine = node(2, 32)
    ranks = list_ranks_of_node(config, "actor", domains_of_gpus(config, "actor", machine))
    assert [rank.domain for rank in ranks] == [0, 0]
    config.model.device = "cpu"
    ranks = list_ranks_of_node(config, "actor", domains_of_gpus(config, "actor", machine))
    assert [rank.domain for rank in ranks] == [0, 1]


@pytest.mark.parametrize("flags", [{"tp_size": 2}, {"dp_size": 2}, {"pp_size": 2}], ids=str)
def test_a_rollout_beside_ranks_has_a_share_for_each_engine_on_every_socket(
    flags: dict[str, int],
) -> None:
    groups = {
        "actor": {
            "roles": ["rollout", "actor"],
            "resources": {"gpus_per_node": 8, "cpus_per_task": 7},
        }
    }
    sizes = {"actor.parallel.data": 8, "rollout.replicas": 4, "rollout.engine.flags": flags}
    config = load(
        [], {"layout": "jobs", "model.device": "cuda", "groups": groups | {"rollout": None}} | sizes
    )
    machine = node(2, 32)
    found = divide_cores(
        machine, list_ranks_of_node(config, "actor", domains_of_gpus(config, "actor", machine))
    )
    assert [len(found["rollout", 0] & set(range(first, first + 32))) for first in (0, 32)] == [
        16,
        16,
    ]
    assert [len(found["actor", rank]) for rank in range(8)] == [4] * 8


def test_the_machine_says_where_cores_and_gpus_are(tmp_path: Path) -> None:
    cpus, numa, driver, pci = (tmp_path / name for name in ("cpu", "node", "gpus", "pci"))
    for cpu in range(8):
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for number, text in enumerate(("0-1,4-5\n", "2-3,6-7\n", "\n")):
        (numa / f"node{number}").mkdir(parents=True)
        (numa / f"node{number}/cpulist").write_text(text)
    both = [Core((0, 4), 0), Core((1, 5), 0), Core((2, 6), 1), Core((3, 7), 1)]
    assert read_cores(set(range(8)), cpus, numa) == both
    assert read_cores({1, 3, 7}, cpus, numa) == [Core((1,), 0), Core((3, 7), 1)], (
        "of those that it may use"
    )
    for minor, (bus, where) in enumerate(
        {"0000:1B:00.0": "1", "0000:9c:00.0": "0", "0000:aa:00.0": "-1"}.items()
    ):
        (driver / bus).mkdir(parents=True)
        (driver / bus / "information").write_text(f"Model: \t X\nDevice Minor: \t {minor}\n")
        (pci / bus.lower()).mkdir(parents=True)
        (pci / bus.lower() / "numa_node").write_text(f"{where}\n")
    assert numa_of_gpus({}, driver, pci) == [1, 0, -1]
    assert numa_of_gpus({"SLURM_STEP_GPUS": "2,0", "CUDA_VISIBLE_DEVICES": "0,1"}, driver, pci) == [
        -1,
        1,
    ]
    assert numa_of_gpus({}, tmp_path / "none", pci) == []
    assert (parse_cpu_list("0-2,8\n"), parse_cpu_list("\n")) == ([0, 1, 2, 8], [])
    assert {
        cpu for core in read_cores(os.sched_getaffinity(0)) for cpu in core.cpus
    } == os.sched_getaffinity(0)


# -- on a real Slurm -------------------------------------------------------------------------------

TAKE = """\
import json, os, pathlib, resource, sys, time
from relax_hpc.config import load_resolved
from relax_hpc.net.rendezvous.affinity import bind_to_share
folder, role = pathlib.Path(sys.argv[1]), sys.argv[2]
before = sorted(os.sched_getaffinity(0))
bind_to_share(load_resolved(folder), "forward", role)
facts = {"before": before, "after": sorted(os.sched_getaffinity(0))}
facts["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
name = f"{role}-{os.environ['SLURM_PROCID']}"
(folder / f"{name}.part").write_text(json.dumps(facts))
(folder / f"{name}.part").rename(folder / f"{name}.json")
deadline = time.monotonic() + 60
while not (folder / "end").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
"""


class Forward:
    """A job of a group of two roles, its steps started by what starts those of a run."""

    def __init__(
        self, sandbox: Sandbox, folder: Path, config: Config, cpus: int, *options: str
    ) -> None:
        self.sandbox, self.folder = sandbox, folder
        self.run, self.config = RunDir(folder), config
        dump(config, self.run.config)
        (folder / "take.py").write_text(TAKE)
        words = ("sbatch", "--parsable", f"--cpus-per-task={cpus}", "--output=/dev/null", *options)
        self.job = sandbox.client(*words, "--wrap=sleep 120").strip()
        until(
            lambda: "RUNNING" in sandbox.client("squeue", "--noheader", "--format=%T"),
            30.0,
            "the job does not start",
        )
        allocation = Allocation(self.job, 0, "node1", {"forward": GroupNodes(self.job, 1)})
        self.launcher = StepLauncher(self.run, config, Slurm(), allocation, lambda: None)

    def start(self, prefix: tuple[str, ...] = ()) -> dict[str, dict]:
        """What each rank of both roles says of itself while all of them run."""
        steps, ranks = [], 0
        for role in group_roles(self.config, "forward"):
            words = self.launcher._srun(self.config, "forward", role, 1)
            ranks += int(
                next(word for word in words if word.startswith("--ntasks=")).partition("=")[2]
            )
            variables = step_environment(self.config, "forward") | {
                "SLURM_CONF": str(self.sandbox.conf)
            }
            (self.run.logs("forward", 1)).mkdir(parents=True, exist_ok=True)
            steps.append(
                subprocess.Popen(
                    [
                        *prefix,
                        *words,
                        sys.executable,
                        str(self.folder / "take.py"),
                        str(self.folder),
                        role,
                    ],
                    env=variables,
                )
            )
        try:
            until(
                lambda: len(list(self.folder.glob("*.json"))) == ranks,
                60.0,
                "not all ranks have come",
            )
        finally:
            (self.folder / "end").touch()
            for step in steps:
                step.wait(30)
            self.sandbox.client("scancel", self.job)
        return {path.stem: json.loads(path.read_text()) for path in self.folder.glob("*.json")}


def forward(ranks: int, **overrides: object) -> Config:
    groups = {
        "forward": {"roles": ["actor_fwd", "reference"]},
        "actor_fwd": None,
        "reference": None,
    }
    sizes = {"actor_fwd.parallel.data": ranks, "reference.parallel.data": ranks}
    return load([], {"layout": "jobs", "groups": groups, **sizes, **overrides})


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> Callable[[Sandbox], None]:
    return lambda sandbox: monkeypatch.setenv("SLURM_CONF", str(sandbox.conf))


@pytest.mark.slurm
def test_two_steps_on_one_node_have_cores_of_their_own(
    tmp_path: Path, environ: Callable[[Sandbox], None]
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs to divide")
    with private_sandbox(nodes=1, cpus=2, bind=True, gpus=0) as own:
        environ(own)
        config = forward(1)
        config.site.setup = ["ulimit -n 777"]
        found = Forward(own, tmp_path, config, 2).start(
            ("bash", "-c", 'ulimit -n 777; exec "$@"', "limited")
        )
        assert {name: facts["before"] for name, facts in found.items()} == {
            name: [0, 1] for name in found
        }
        assert sorted(facts["after"] for facts in found.values()) == [[0], [1]]
        assert {facts["files"] for facts in found.values()} == {777}, "limits come along"
        other = tmp_path / "slurms own"
        other.mkdir()
        config.site.srun_options = {"cpu-bind": "cores"}
        found = Forward(own, other, config, 2).start()
        assert all(facts["before"] == facts["after"] for facts in found.values()), (
            "then Slurm binds"
        )


@pytest.mark.slurm
def test_slurmctld_gives_each_step_all_64_cores_and_the_plan_divides_them(
    tmp_path: Path, environ: Callable[[Sandbox], None]
) -> None:
    """Read off its own choice, as this machine has not so many."""
    with private_sandbox(
        nodes=1, cpus=64, sockets=2, memory=9000, gpus=0, extra=("DebugFlags=Steps",)
    ) as own:
        environ(own)
        config = forward(8)
        config.groups["forward"].resources.cpus_per_task = 4
        run = Forward(own, tmp_path, config, 4, "--ntasks-per-node=16")
        run.start()
        until(lambda: len(picked(own)) == 2, 10.0, "slurmctld says nothing of two steps")
        for step in picked(own):
            assert step == {(socket, core) for socket in range(2) for core in range(32)}
        machine = node(2, 32)
        found = divide_cores(
            machine,
            list_ranks_of_node(config, "forward", domains_of_gpus(config, "forward", machine)),
        )
        assert sorted(cpu for share in found.values() for cpu in share) == list(range(64))


def picked(sandbox: Sandbox) -> list[set[tuple[int, int]]]:
    """Socket and core of each core that slurmctld picked, a set a step."""
    found: list[set[tuple[int, int]]] = []
    for line in (sandbox.folder / "log/slurmctld.log").read_text().splitlines():
        if match := re.search(r"_pick_step_core: alloc Node:0 Socket:(\d+) Core:(\d+)", line):
            core = (int(match[1]), int(match[2]))
            if not found or core in found[-1]:
                found.append(set())
            found[-1].add(core)
    return found
