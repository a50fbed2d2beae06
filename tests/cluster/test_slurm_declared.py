"""Whole clusters that a real slurmctld knows and that run nothing: what Slurm makes of each
component of each size."""

from __future__ import annotations

import os
import pwd
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.sandbox import Sandbox
from relax_hpc.cluster.slurm.het_options import INHERITED
from relax_hpc.cluster.slurm.layout import Component, components, time_limit_s
from relax_hpc.cluster.slurm.render import render
from relax_hpc.config import Config, load
from tests.helpers.cluster_sizes import SIZES, gpus_of, nodes_of
from tests.helpers.slurm_sandbox import private_sandbox

pytestmark = pytest.mark.slurm

BIG = "Sockets=2 CoresPerSocket=32 RealMemory=1000000"
DECLARED = (
    f"eight[1-128] {BIG} Gres=gpu:8 Features=fast",
    "four[1-32] Sockets=2 CoresPerSocket=16 RealMemory=500000 Gres=gpu:4",
    "three[1-4] Sockets=2 CoresPerSocket=16 RealMemory=500000 Gres=gpu:3",
    "two[1-4] Sockets=2 CoresPerSocket=16 RealMemory=500000 Gres=gpu:2",
    "one[1-4] Sockets=2 CoresPerSocket=16 RealMemory=500000 Gres=gpu:1",
    "thin[1-4] CPUs=32 RealMemory=100000",
)
PARTITIONS = (
    "eight Nodes=eight[1-128]",
    "four Nodes=four[1-32]",
    *(f"{name} Nodes={name}[1-4]" for name in ("three", "two", "one", "thin")),
)
PARTITION_BY_GPUS = {8: "eight", 4: "four", 3: "three", 2: "two", 1: "one"}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Sandbox]:
    """One controller for all sizes."""
    lines = tuple(f"PartitionName={line} MaxTime=INFINITE" for line in PARTITIONS)
    with private_sandbox(nodes=0, declared=DECLARED, extra=lines) as own:
        user = pwd.getpwuid(os.getuid()).pw_name
        own.client(
            *("scontrol", "create", "reservation", "ReservationName=ours", f"Users={user}"),
            *("Nodes=thin[1-2]", "StartTime=now", "Duration=1000"),
        )
        yield own


def held(cluster: Sandbox, folder: Path, text: str) -> list[dict[str, str]]:
    """What slurmctld has of each component of a script, which is held and then withdrawn."""
    script = folder / "held.sbatch"
    script.write_text(text)
    done = subprocess.run(
        ["sbatch", "--parsable", "--hold", script],
        env=cluster.environment(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    job = done.stdout.strip()
    try:
        lines = cluster.client("scontrol", "--oneliner", "show", "job", job).splitlines()
    finally:
        cluster.client("scancel", job)
    return [dict(word.split("=", 1) for word in line.split() if "=" in word) for line in lines]


def config_of(size: Path, layout: str = "het", **overrides: Any) -> Config:
    site = {"site.partition": PARTITION_BY_GPUS[gpus_of(size)], "site.hub_partition": "thin"}
    fixed = {
        "name": "demo",
        "run_dir": "/scratch/demo",
        "layout": layout,
        "site.python": "/opt/python",
    }
    return load([size], fixed | site | overrides)


def check(found: dict[str, str], part: Component) -> None:
    """A component is exactly what the layout says: nothing less, and nothing of another's."""
    assert found["JobName"] == f"{part.name}-demo"
    assert found["NumNodes"] in (f"{part.nodes}", f"{part.nodes}-{part.nodes}")
    assert int(found["NumTasks"]) == part.nodes * part.tasks_per_node
    assert int(found["CPUs/Task"]) == part.cpus_per_task
    assert found["Partition"] == part.options["partition"]
    days, _, clock = found["TimeLimit"].rpartition("-")
    assert time_limit_s(f"{days or 0}-{clock}", "TimeLimit") == time_limit_s(part.time, "time")
    assert found.get("TresPerNode") == (
        f"gres:gpu:{part.gpus_per_node}" if part.gpus_per_node else None
    )
    assert found["MinMemoryNode"] == part.memory
    assert found["Account"] == part.options.get("account", "(null)")
    assert found["Nice"] == part.options.get("nice", "0")
    assert found["ExcNodeList"] in (
        part.options.get("exclude", "(null)"),
        part.options.get("exclude", ""),
    )
    assert found.get("Reservation", "") == part.options.get("reservation", "")
    assert found.get("Comment", "") == part.options.get("comment", "")
    assert found["DelayBoot"] == "00:00:00" or "delay-boot" in part.options
    assert found["StdIn"] == "/dev/null" or "input" in part.options
    assert (found["EligibleTime"] == "Unknown") == ("begin" not in part.options)
    assert found["Requeue"] == "0"


MANY = [size for size in SIZES if nodes_of(size) > 1]
PASSED_ON = {
    "nice": "100",
    "exclude": "eight2",
    "begin": "now+1hour",
    "comment": "hub-only",
    "reservation": "ours",
    "delay-boot": "5",
    "input": "/etc/hosts",
}
"""Of the hub alone."""


@pytest.mark.parametrize("size", MANY, ids=lambda size: size.stem)
@pytest.mark.parametrize("passed_on", [{}, PASSED_ON], ids=["plain", "options"])
def test_each_component_of_each_size_is_what_the_layout_says(
    cluster: Sandbox, tmp_path: Path, size: Path, passed_on: dict[str, str]
) -> None:
    config = config_of(size)
    config.groups["hub"].resources.options = dict(passed_on)
    parts = components(config)
    found = held(cluster, tmp_path, render(config)["run.sbatch"])
    assert len(found) == len(parts)
    for one, part in zip(found, parts, strict=True):
        check(one, part)


@pytest.mark.parametrize("size", MANY, ids=lambda size: size.stem)
def test_a_hub_that_rides_gives_its_own_options_to_nobody(
    cluster: Sandbox, tmp_path: Path, size: Path
) -> None:
    config = config_of(size, **{"site.cpu_nodes": False, "slurm.one_node_hub": True})
    config.groups["hub"].resources.options = dict(PASSED_ON)
    for one, part in zip(
        held(cluster, tmp_path, render(config)["run.sbatch"]), components(config), strict=True
    ):
        check(one, part)


@pytest.mark.parametrize("size", MANY, ids=lambda size: size.stem)
def test_each_job_of_the_layout_jobs_is_what_the_layout_says(
    cluster: Sandbox, tmp_path: Path, size: Path
) -> None:
    for nodes in (True, False):
        config = config_of(size, "jobs", **{"site.cpu_nodes": nodes})
        texts = render(config)
        for part in components(config):
            (found,) = held(cluster, tmp_path, texts[f"{part.name}.sbatch"])
            check(found | {"Requeue": "0"}, part)
            assert found["Requeue"] == "1"
            assert part.gpus_per_node or nodes, "no job without a GPU where all nodes have some"


@pytest.mark.parametrize("option", sorted(set(INHERITED) - {"mem"}))
def test_what_sbatch_passes_on_is_undone_or_refused(option: str) -> None:
    config = config_of(MANY[0])
    config.groups["hub"].resources.options = {option: "x"}
    if INHERITED[option] is None:
        with pytest.raises(
            ConfigError, match=rf"groups.\w+.resources.options.{option}: found none, but groups.hub"
        ):
            render(config)
        config.site.options = {option: "y"}
    own = [
        line
        for line in render(config)["run.sbatch"].splitlines()
        if line.startswith(f"#SBATCH --{option}=")
    ]
    assert len(own) == len(components(config))


def test_memory_of_the_hub_alone_is_refused() -> None:
    config = config_of(MANY[0])
    for name in ("rollout", "actor"):
        config.groups[name].resources.memory = ""
        with pytest.raises(
            ConfigError,
            match=rf"groups.{name}.resources.memory: found none, but groups.\w+ states one",
        ):
            render(config)
        config.groups[name].resources.memory = "0"
    config.groups["rollout"].resources = config.groups["rollout"].resources.__class__(
        options={"mem-per-cpu": "4G"}
    )
    with pytest.raises(
        ConfigError, match=r"rollout.resources.memory: found none, but mem-per-cpu 4G, with which"
    ):
        render(config)


def test_sbatch_itself_passes_on_what_the_table_says(cluster: Sandbox, tmp_path: Path) -> None:
    """Were it otherwise, nothing of this would be needed: without a word of ours the second
    component has it all."""
    words = {name: value for name, value in PASSED_ON.items() if name != "begin"} | {
        "mem": "2G",
        "account": "cpu-hours",
    }
    lines = "".join(f"#SBATCH --{name}={value!r}\n" for name, value in words.items())
    text = (
        f"#!/bin/bash\n#SBATCH --partition=thin\n{lines}#SBATCH hetjob\n#SBATCH "
        "--partition=eight\ntrue\n"
    )
    _, second = held(cluster, tmp_path, text)
    names = ("Nice", "ExcNodeList", "Comment", "Reservation", "StdIn", "MinMemoryNode", "Account")
    assert [second.get(name, "") for name in names] == [
        "100", "eight2", "hub-only", "ours", "/etc/hosts", "2G", "cpu-hours",
    ]  # fmt: skip
