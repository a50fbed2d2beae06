"""Cores of ranks: no two roles of a group share a core, and each is near its GPU; also on Slurm."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import chain, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.machine.gpu_vendors import VENDORS
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
from tests.helpers.cluster_sizes import SIZES, gpus_of, nodes_of
from tests.helpers.slurm_sandbox import private_sandbox

RANKS = st.lists(
    st.tuples(st.integers(1, 8), st.none() | st.integers(0, 3)), min_size=1, max_size=24
)


def node(sockets: int, cores_per_socket: int, threads: int = 1) -> list[Core]:
    """Cores of a node. Second threads are numbered after all first threads, as on most machines."""
    total_cores = sockets * cores_per_socket
    return [
        Core(
            tuple(number + total_cores * thread for thread in range(threads)),
            number // cores_per_socket,
        )
        for number in range(total_cores)
    ]


@given(RANKS, st.integers(1, 4), st.integers(1, 40), st.integers(1, 2))
def test_shares_are_whole_cores_and_disjoint(
    weights_and_domains: list[tuple[int, int | None]],
    sockets: int,
    cores_per_socket: int,
    threads: int,
) -> None:
    ranks = [
        Rank("r", number, weight, domain)
        for number, (weight, domain) in enumerate(weights_and_domains)
    ]
    machine = node(sockets, cores_per_socket, threads)
    shares = divide_cores(machine, ranks)
    if len(machine) < len(ranks):
        assert shares == {}
        return
    assert set(shares) == {("r", number) for number in range(len(ranks))}
    shared_cpus = list(chain.from_iterable(shares.values()))
    assert all(shares.values()) and len(shared_cpus) == len(set(shared_cpus))
    for core in machine:
        assert sum(bool(share & set(core.cpus)) for share in shares.values()) <= 1


@pytest.mark.parametrize(
    "size", [size for size in SIZES if nodes_of(size) > 1], ids=lambda size: size.stem
)
def test_ranks_of_each_size_run_on_the_socket_of_their_gpu(size: Path) -> None:
    config, gpus = load([size]), gpus_of(size)
    machine = node(2, 4 * gpus)
    for group in config.groups:
        if group == "hub":
            continue
        shares = divide_cores(
            machine, list_ranks_of_node(config, group, domains_of_gpus(config, group, machine))
        )
        shared_cpus = list(chain.from_iterable(shares.values()))
        assert len(shared_cpus) == len(set(shared_cpus)) and {role for role, _ in shares} == set(
            group_roles(config, group)
        )
        for (role, rank), share in shares.items():
            assert len(share) >= config.groups[group].resources.cpus_per_task
            if role != "rollout":
                sockets = {cpu // (4 * gpus) for cpu in share}
                # An odd number of ranks does not fit on two sockets without one rank on both.
                assert rank * 2 // gpus in sockets, "local rank r has GPU r"
                assert len(sockets) == 1 or gpus % 2 == 1


def test_fewer_ranks_than_gpus_use_the_first_gpus() -> None:
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
def test_a_rollout_with_ranks_has_a_share_for_each_engine_on_every_socket(
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
    shares = divide_cores(
        machine, list_ranks_of_node(config, "actor", domains_of_gpus(config, "actor", machine))
    )
    assert [len(shares["rollout", 0] & set(range(first, first + 32))) for first in (0, 32)] == [
        16,
        16,
    ]
    assert [len(shares["actor", rank]) for rank in range(8)] == [4] * 8


def test_cores_and_numa_nodes_of_gpus_are_read_from_sysfs(tmp_path: Path) -> None:
    cpus, numa = tmp_path / "cpu", tmp_path / "node"
    driver, pci = tmp_path / "proc/driver/nvidia/gpus", tmp_path / "sys/bus/pci/devices"
    nvidia = VENDORS["nvidia"]
    for cpu in range(8):
        (cpus / f"cpu{cpu}/topology").mkdir(parents=True)
        (cpus / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{cpu % 4},{cpu % 4 + 4}\n")
    for number, text in enumerate(("0-1,4-5\n", "2-3,6-7\n", "\n")):
        (numa / f"node{number}").mkdir(parents=True)
        (numa / f"node{number}/cpulist").write_text(text)
    expected = [Core((0, 4), 0), Core((1, 5), 0), Core((2, 6), 1), Core((3, 7), 1)]
    assert read_cores(set(range(8)), cpus, numa) == expected
    assert read_cores({1, 3, 7}, cpus, numa) == [Core((1,), 0), Core((3, 7), 1)], (
        "only cores that the process may use"
    )
    for minor, (bus, numa_node) in enumerate(
        {"0000:1B:00.0": "1", "0000:9c:00.0": "0", "0000:aa:00.0": "-1"}.items()
    ):
        (driver / bus).mkdir(parents=True)
        (driver / bus / "information").write_text(f"Model: \t X\nDevice Minor: \t {minor}\n")
        (pci / bus.lower()).mkdir(parents=True)
        (pci / bus.lower() / "numa_node").write_text(f"{numa_node}\n")
    assert numa_of_gpus(nvidia, {}, tmp_path) == [1, 0, -1]
    variables = {"SLURM_STEP_GPUS": "2,0", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert numa_of_gpus(nvidia, variables, tmp_path) == [-1, 1]
    assert numa_of_gpus(nvidia, {}, tmp_path / "none") == []
    assert (parse_cpu_list("0-2,8\n"), parse_cpu_list("\n")) == ([0, 1, 2, 8], [])
    own_cores = read_cores(os.sched_getaffinity(0))
    assert set().union(*(core.cpus for core in own_cores)) == os.sched_getaffinity(0)


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
    """A job of a group of two roles, whose steps `StepLauncher` starts as in a run."""

    def __init__(
        self, sandbox: Sandbox, folder: Path, config: Config, cpus: int, *options: str
    ) -> None:
        self.sandbox, self.folder = sandbox, folder
        self.run, self.config = RunDir(folder), config
        dump(config, self.run.config)
        (folder / "take.py").write_text(TAKE)
        command = (
            "sbatch",
            "--parsable",
            f"--cpus-per-task={cpus}",
            "--output=/dev/null",
            *options,
        )
        self.job = sandbox.client(*command, "--wrap=sleep 120").strip()
        until(
            lambda: "RUNNING" in sandbox.client("squeue", "--noheader", "--format=%T"),
            30.0,
            "the job does not start",
        )
        allocation = Allocation(self.job, 0, "node1", {"forward": GroupNodes(self.job, 1)})
        self.launcher = StepLauncher(self.run, config, Slurm(), allocation, lambda: None)

    def start(self, prefix: tuple[str, ...] = ()) -> dict[str, dict]:
        """Facts that each rank of both roles reports while all ranks run, by file name."""
        steps, ranks = [], 0
        for role in group_roles(self.config, "forward"):
            command = self.launcher._srun(self.config, "forward", role, 1)
            ranks += int(
                next(option for option in command if option.startswith("--ntasks=")).partition("=")[
                    2
                ]
            )
            variables = step_environment(self.config, "forward") | {
                "SLURM_CONF": str(self.sandbox.conf)
            }
            (self.run.logs("forward", 1)).mkdir(parents=True, exist_ok=True)
            steps.append(
                subprocess.Popen(
                    [
                        *prefix,
                        *command,
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
                "not all ranks have reported",
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
def test_two_steps_on_one_node_have_disjoint_cores(
    tmp_path: Path, environ: Callable[[Sandbox], None]
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("needs two CPUs to divide")
    with private_sandbox(nodes=1, cpus=2, bind=True, gpus=0) as sandbox:
        environ(sandbox)
        config = forward(1)
        config.site.setup = ["ulimit -n 777"]
        facts_of_ranks = Forward(sandbox, tmp_path, config, 2).start(
            ("bash", "-c", 'ulimit -n 777; exec "$@"', "limited")
        )
        assert {name: facts["before"] for name, facts in facts_of_ranks.items()} == {
            name: [0, 1] for name in facts_of_ranks
        }
        assert sorted(facts["after"] for facts in facts_of_ranks.values()) == [[0], [1]]
        assert {facts["files"] for facts in facts_of_ranks.values()} == {777}, (
            "limits are inherited"
        )
        second_folder = tmp_path / "slurms own"
        second_folder.mkdir()
        config.site.srun_options = {"cpu-bind": "cores"}
        facts_of_ranks = Forward(sandbox, second_folder, config, 2).start()
        assert all(facts["before"] == facts["after"] for facts in facts_of_ranks.values()), (
            "with cpu-bind, Slurm binds and relax_hpc does not"
        )


@pytest.mark.slurm
def test_each_step_gets_all_64_cores_and_the_plan_divides_them(
    tmp_path: Path, environ: Callable[[Sandbox], None]
) -> None:
    """The cores are read from the log of slurmctld, because this machine has fewer than 64."""
    with private_sandbox(
        nodes=1, cpus=64, sockets=2, memory=9000, gpus=0, extra=("DebugFlags=Steps",)
    ) as sandbox:
        environ(sandbox)
        config = forward(8)
        config.groups["forward"].resources.cpus_per_task = 4
        job = Forward(sandbox, tmp_path, config, 4, "--ntasks-per-node=16")
        job.start()
        until(lambda: len(picked_cores(sandbox)) == 2, 10.0, "slurmctld says nothing of two steps")
        for step in picked_cores(sandbox):
            assert step == set(product(range(2), range(32)))
        machine = node(2, 32)
        shares = divide_cores(
            machine,
            list_ranks_of_node(config, "forward", domains_of_gpus(config, "forward", machine)),
        )
        assert sorted(chain.from_iterable(shares.values())) == list(range(64))


def picked_cores(sandbox: Sandbox) -> list[set[tuple[int, int]]]:
    """Sets of (socket, core) that slurmctld picked_cores, one set for each step."""
    cores_of_steps: list[set[tuple[int, int]]] = []
    for line in (sandbox.folder / "log/slurmctld.log").read_text().splitlines():
        if match := re.search(r"_pick_step_core: alloc Node:0 Socket:(\d+) Core:(\d+)", line):
            core = (int(match[1]), int(match[2]))
            if not cores_of_steps or core in cores_of_steps[-1]:
                cores_of_steps.append(set())
            cores_of_steps[-1].add(core)
    return cores_of_steps
