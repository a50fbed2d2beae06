"""`relax-hpc doctor` with a fake Slurm: its queries, and Slurm's settings, limits and refusals."""

from __future__ import annotations

import json
import re
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.machine.facts import read_facts
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.ops.checks import machine
from relax_hpc.ops.doctor.doctor import diagnose
from tests.helpers.doctor_helpers import bad, expect, fake_fixture, group, make, site  # noqa: F401
from tests.helpers.fake_slurm import CONFIG, PARTITION, FakeSlurm
from tests.requirements import requires

requires("mpi")
ROOT = Path(__file__).resolve().parents[2]
NO_ACCOUNTS = "warning: site.account, site.qos: checked"


@pytest.mark.parametrize("layout", ["het", "jobs", "local"])
def test_a_valid_configuration_has_no_findings(
    fake: FakeSlurm, tmp_path: Path, layout: str
) -> None:
    findings = bad(diagnose(make(tmp_path, {"layout": layout}), Slurm()))
    assert [line for line in findings if not line.startswith(NO_ACCOUNTS)] == []


CLUSTER_MISTAKES = [
    (
        group("actor", nodes=5) | {"actor": {"parallel": {"data": 5}}},
        {},
        "error: groups.actor.resources.nodes: found 5, allowed in partition main: 4",
    ),
    (
        group("rollout", nodes=3) | {"rollout": {"replicas": 3}},
        {"MaxNodes": "2"},
        "error: groups.rollout.resources.nodes: found 3, allowed .*: 2",
    ),
    (
        group("rollout", nodes=1),
        {"MinNodes": "2"},
        "error: groups.rollout.resources.nodes: found 1, allowed .*least 2",
    ),
    (
        site(gpu_request="gres") | group("actor", gpus_per_node=8),
        {},
        "error: groups.actor.resources.gpus_per_node: found 8, nodes of partition main have at "
        "most 4 GPUs",
    ),
    (
        site(gpu_request="gres", gpu_type="h100") | group("actor", gpus_per_node=1),
        {},
        "error: groups.actor.resources.gpus_per_node: found 1, .* at most 0 GPUs of type h100; see "
        "site.gpu_type",
    ),
    (
        group("actor", cpus_per_task=64),
        {},
        "error: groups.actor.resources.cpus_per_task: found 64, .* at most 8",
    ),
    (
        group("actor", memory="128G"),
        {},
        "error: groups.actor.resources.memory: found 128G, .* at most 64000M",
    ),
    (
        {"slurm": {"time": "2-00:00:00"}},
        {},
        "error: slurm.time: found 2-00:00:00, allowed in partition main: 1-00:00:00",
    ),
    (
        {"layout": "jobs"} | group("rollout", time="30:00:00"),
        {},
        "error: groups.rollout.resources.time: found 30:00:00, allowed",
    ),
    (
        site(partition="mian"),
        {},
        "error: site.partition: found 'mian', allowed: main; did you mean main",
    ),
    (site(hub_partition="cpu"), {}, "error: site.hub_partition: found 'cpu', allowed: main"),
    (
        site(partition=""),
        {"Default": "NO"},
        "error: site.partition: found none, and Slurm has no default",
    ),
    ({}, {"State": "DRAIN"}, "error: site.partition: partition main is DRAIN"),
    (
        {},
        {"AllocNodes": "login1"},
        "error: site.sbatch_on_nodes: found true, .* accepts jobs only from login1",
    ),
    (
        site(account="b"),
        {"AllowAccounts": "a,c"},
        "error: site.account: found 'b', allowed in partition main: a,c",
    ),
    (site(qos="b"), {"DenyQos": "b"}, "error: site.qos: found 'b', which partition main denies"),
    (
        {},
        {"AllowGroups": "chosen-few"},
        "error: site.partition: partition main is for the Unix groups chosen-few",
    ),
    (
        {"layout": "jobs"},
        {"OverSubscribe": "EXCLUSIVE"},
        "warning: site.partition: .* the hub would take one",
    ),
]


@pytest.mark.parametrize(("changes", "partition", "expected"), CLUSTER_MISTAKES)
def test_the_request_against_the_partition(
    fake: FakeSlurm, tmp_path: Path, changes: dict, partition: dict, expected: str
) -> None:
    fake.set(partitions=[PARTITION | partition])
    expect(diagnose(make(tmp_path, changes), Slurm()), expected)


SLURM_MISTAKES = [
    (
        {},
        {"SchedulerType": "sched/builtin"},
        "error: layout: found het, but SchedulerType is sched/builtin",
    ),
    (
        {},
        {"SchedulerParameters": "x,disable_hetjob_steps"},
        "warning: layout: .*disable_hetjob_steps",
    ),
    ({"layout": "jobs"}, {"JobRequeue": "0"}, "warning: layout: found jobs with JobRequeue=0"),
    ({}, {"KillWait": "3 sec"}, "warning: KillWait: found 3 s, recommended: at least 30"),
    (
        {},
        {"PreemptMode": "REQUEUE"},
        "warning: PreemptMode: found REQUEUE without .*preempt_send_user_signal",
    ),
    ({}, {"PreemptMode": "GANG,SUSPEND"}, "warning: PreemptMode: found SUSPEND"),
]


@pytest.mark.parametrize(("changes", "slurm", "expected"), SLURM_MISTAKES)
def test_slurms_own_settings(
    fake: FakeSlurm, tmp_path: Path, changes: dict, slurm: dict, expected: str
) -> None:
    fake.set(config=CONFIG | slurm)
    expect(diagnose(make(tmp_path, changes), Slurm()), expected)


def test_preemption_that_announces_itself(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.set(config={"PreemptMode": "REQUEUE", "SlurmctldParameters": "preempt_send_user_signal"})
    assert not [line for line in bad(diagnose(make(tmp_path, {}), Slurm())) if "Preempt" in line]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        (
            {},
            r"found 'none', .* grants 0.8 GiB per node \(DefMemPerCPU 100 MiB x 8 CPUs\), allowed: "
            r"at least \d+ GiB",
        ),
        ({"memory": "20G"}, r"found '20G', .* grants 20.0 GiB per node \(as requested\)"),
        ({"memory": "0"}, ""),
        ({"memory": "50G"}, ""),
        ({"memory": "0", "node_mib": 340000}, ""),
        # Of 340,000 MiB, 4 GPUs of 79 GiB have 323,584.
        (
            {"memory": "0", "node_mib": 340000, "memory_includes_gpus": True},
            r"found '0', .* grants 16.0 GiB per node \(RealMemory, without the memory of the "
            r"GPUs\), .*; the nodes have no more",
        ),
    ],
)
def test_requested_memory_is_compared_with_the_model(
    fake: FakeSlurm, tmp_path: Path, resources: dict[str, Any], expected: str
) -> None:
    resources = dict(resources)
    node_mib = resources.pop("node_mib", 64000)
    fake.set(
        config=CONFIG | {"SelectTypeParameters": "CR_CPU_MEMORY", "DefMemPerCPU": "100"},
        nodes=[f"node{n}|main*|idle|8|{node_mib}|host{n}|gpu:4" for n in range(4)],
    )
    grace_hopper = site(memory_includes_gpus=resources.pop("memory_includes_gpus", False))
    shutil.copy(ROOT / "configs/models/Qwen3-4B/config.json", tmp_path)
    config = make(
        tmp_path,
        {"layout": "jobs", "rollout": {"replicas": 8}}
        | grace_hopper
        | group("rollout", cpus_per_task=8, **resources),
    )
    config.model.device, config.model.path = "cuda", str(tmp_path)
    for settings in config.groups.values():
        settings.resources.gpus_per_node = 4
    findings = [
        line
        for line in bad(diagnose(config, Slurm()))
        if line.startswith("warning: groups.rollout.resources.memory")
    ]
    assert len(findings) == bool(expected) and all(
        re.search(expected, line) for line in findings
    ), findings


def test_an_untried_version(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sinfo", "slurm 26.05.0\n", match="--version")
    expect(diagnose(make(tmp_path, {}), Slurm()), "warning: Slurm 26.05.0: untested, tested: 22.05")


def test_nodes_that_are_down(fake: FakeSlurm, tmp_path: Path) -> None:
    states = ("idle", "down*", "drained", "idle*")
    fake.set(
        nodes=[f"node{n}|main*|{state}|8|64000|host{n}|gpu:4" for n, state in enumerate(states)]
    )
    expect(
        diagnose(make(tmp_path, {}), Slurm()),
        "warning: groups.hub.resources: 2 nodes requested, but only 1 nodes of partition main",
    )


def test_typed_gpus(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.set(
        nodes=[
            f"n{n}|main*|idle|8|64000|host{n}|gpu:a100:2(S:0),gpu:h100:4(S:1),shard:8"
            for n in range(4)
        ]
    )
    count = {"model": {"device": "cuda"}, "site": {"gpu_request": "gres", "gpu_type": "h100"}}
    groups = {
        name: {"resources": {"gpus_per_node": 4}}
        for name in ("actor", "rollout", "actor_fwd", "reference")
    }
    good = diagnose(make(tmp_path, count | {"groups": groups}), Slurm())
    assert not [line for line in bad(good) if "gpus_per_node" in line]
    groups["actor"]["resources"]["gpus_per_node"] = 5
    expect(
        diagnose(make(tmp_path, count | {"groups": groups}), Slurm()),
        "error: groups.actor.* at most 4 GPUs of type",
    )


def test_a_plugin_of_mpi_that_srun_lacks(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("srun", err="MPI plugin types are...\n\tnone\n", match="--mpi=list")
    expect(
        diagnose(make(tmp_path, {}), Slurm()),
        "error: site.mpi.launcher: found pmi2, allowed by srun --mpi=list: none",
    )


def test_pyxis_that_srun_lacks(fake: FakeSlurm, tmp_path: Path) -> None:
    container = site(container={"runtime": "pyxis", "image": "docker://x"})
    expect(
        diagnose(make(tmp_path, container), Slurm()),
        "error: site.container.runtime: found pyxis, but srun here has no",
    )
    fake.answer("srun", "  --container-image=[USER@][REGISTRY#]IMAGE\n", match="--help")
    assert not [
        line for line in bad(diagnose(make(tmp_path, container), Slurm())) if "found pyxis" in line
    ]
    container = site(container={"runtime": "edf", "image": "/x.toml"})
    expect(
        diagnose(make(tmp_path, container), Slurm()),
        "error: site.container.runtime: found edf, but srun here has no option --environment",
    )


ACCOUNT_MISTAKES = [
    (site(account="x"), "a|normal,long||\n", "error: site.account: found 'x', allowed for you: a"),
    (
        site(account="a", qos="fast"),
        "a|normal,long||\n",
        "error: site.qos: found 'fast', allowed for you: long, normal",
    ),
    (
        {"layout": "jobs"},
        "a|normal|2|100\n",
        r"error: layout: found jobs with 4 concurrent jobs, allowed for you: 2",
    ),
    (
        site(account="a", sbatch_on_nodes=False) | {"slurm": {"successors": 2}},
        "a|normal|10|11\n",
        "error: layout: found het with 12 submitted jobs, .* allowed for account a: 11",
    ),
]


@pytest.mark.parametrize(("changes", "rows", "expected"), ACCOUNT_MISTAKES)
def test_accounts_and_limits(
    fake: FakeSlurm, tmp_path: Path, changes: dict, rows: str, expected: str
) -> None:
    fake.answer("sacctmgr", rows, match="associations")
    fake.answer("sacctmgr", "normal||||||\n", match="show qos")
    expect(diagnose(make(tmp_path, changes), Slurm()), expected)


def test_limits_of_a_qos(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("sacctmgr", "a|debug||\n", match="associations")
    fake.answer("sacctmgr", "debug|1|1||||\n", match="show qos")
    expect(
        diagnose(make(tmp_path, site(qos="debug")), Slurm()),
        "error: layout: .* allowed for qos debug: 1",
    )


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ("debug|||2:00:00|||", "error: slurm.time: found 24:00:00, allowed by qos debug: 2:00:00"),
        ("debug|||1-00:00:00|||", ""),
        (
            "debug||||cpu=9,gres/gpu=1||",
            r"error: site.qos: found debug with \d+ gres/gpu requested, allowed for a job: 1 \(MaxTRES\)",
        ),
        (
            "debug|||||gres/gpu=7|",
            r"error: site.qos: .* with 8 gres/gpu requested, allowed for a user: 7 \(MaxTRESPU\)",
        ),
        (
            "debug||||||node=5",
            r"error: site.qos: .* with 6 node requested, allowed for all users: 5 \(GrpTRES\)",
        ),
        ("debug||||gres/gpu=2|gres/gpu=8|node=6", ""),
    ],
)
def test_requests_are_compared_with_the_limits_of_a_qos(
    fake: FakeSlurm, tmp_path: Path, row: str, expected: str
) -> None:
    fake.answer("sacctmgr", "a|debug||\n", match="associations")
    fake.answer("sacctmgr", f"{row}\n", match="show qos")
    groups = {
        name: {"resources": {"gpus_per_node": 2}}
        for name in ("rollout", "actor", "actor_fwd", "reference")
    }
    config = make(tmp_path, site(qos="debug", gpu_request="gres") | {"groups": groups})
    findings = diagnose(config, Slurm())
    if expected:
        expect(findings, expected)
    else:
        assert not [line for line in bad(findings) if "qos" in line]


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        (
            "Invalid account or account/partition combination specified",
            "site.account, site.partition",
        ),
        ("Invalid qos specification", "site.qos"),
    ],
)
def test_sbatch_rejects_an_account_if_sacctmgr_is_missing(
    fake: FakeSlurm, tmp_path: Path, reason: str, key: str
) -> None:
    fake.remove("sacctmgr")
    fake.answer("sbatch", err=f"allocation failure: {reason}\n", code=1, match="--test-only")
    findings = diagnose(make(tmp_path, site(account="x", qos="y")), Slurm())
    expect(findings, f"error: run.sbatch: sbatch --test-only rejects it: .*{reason}; see {key}$")
    expect(findings, f"{NO_ACCOUNTS} only by sbatch --test-only")


def test_sbatch_test_only_reports_its_refusal(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer(
        "sbatch",
        err="allocation failure: Requested reservation is invalid\n",
        code=1,
        match="--test-only",
    )
    findings = diagnose(make(tmp_path, {}), Slurm())
    expect(findings, "error: run.sbatch: sbatch --test-only rejects it: .*reservation is invalid")
    assert len(fake.calls("sbatch")) == 1


def test_a_missing_slurm(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.remove("sbatch")
    expect(diagnose(make(tmp_path, {}), Slurm()), "error: Slurm: sbatch not found on PATH")


def test_a_dead_controller(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer(
        "scontrol", err="slurm_load_partitions: Unable to contact slurm controller\n", code=1
    )
    expect(
        diagnose(make(tmp_path, {}), Slurm(tries=1)),
        "error: Slurm: .*Unable to contact slurm controller",
    )


def test_checks_that_slurm_cannot_answer_are_listed(fake: FakeSlurm, tmp_path: Path) -> None:
    fake.answer("srun", err="srun: error: broken\n", code=1)
    fake.answer("sacctmgr", err="sacctmgr: error: slurmdbd is down\n", code=1)
    findings = diagnose(make(tmp_path, {}), Slurm())
    expect(findings, "warning: site.mpi.launcher: not checked: .*broken")
    expect(findings, "warning: site.account, .*: not checked: .*slurmdbd is down")
    expect(diagnose(make(tmp_path, {}), None), "warning: Slurm: not queried")


NEEDS = {
    "pythons": ["3.11", "3.12"],
    "cuda": "",
    "architectures": {"x86_64": {"glibc": "2.34", "glibc_package": "sglang 0.5.21"}},
}
"""Part of the needs of a lock without wheels for aarch64."""


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment of `env/setup.sh` whose lock has `NEEDS`, without its packages."""
    folder = tmp_path / "environment"
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to("/bin/true")
    (folder / "minimum_requirements.json").write_text(json.dumps(NEEDS))
    return folder


def requirement_findings(fake: FakeSlurm, tmp_path: Path, environment: Path) -> list[str]:
    config = make(tmp_path, site(python=str(environment / "bin/python")))
    findings = [item for item in diagnose(config, Slurm()) if " needed by " in item.text]
    return [f"{item.severity}: {item.text}" for item in findings]


def test_the_architecture_of_nodes_is_compared_with_the_lock(
    fake: FakeSlurm, tmp_path: Path, environment: Path
) -> None:
    """Fields of `scontrol show node` as Slurm 22.05 prints them."""
    line = "NodeName=node1 Arch={} CoresPerSocket=72 CPUAlloc=0 OS=Linux 5.14.0-427.el9"
    for architecture, expected in (
        ("x86_64", []),
        (
            "aarch64",
            [
                "error: CPU architecture aarch64 found, x86_64 needed by the wheels of this lock: "
                "install on a machine with such a CPU, and run there (node node1 of partition main)"
            ],
        ),
    ):
        fake.answer("scontrol", line.format(architecture), match="show node")
        assert requirement_findings(fake, tmp_path, environment) == expected


def test_known_facts_of_nodes_are_compared_with_the_lock(
    fake: FakeSlurm, tmp_path: Path, environment: Path
) -> None:
    """Those that `env/setup.sh` got by RELAX_FACTS."""
    facts = environment / "machine_facts.json"
    text = "glibc {} found, 2.34 needed by sglang 0.5.21: use site.container (env/relax_hpc.def)"
    for version, expected in (
        ("2.28", [f"error: {text.format('2.28')} (facts of the nodes in machine_facts.json)"]),
        ("2.34", []),
    ):
        content = {"system": "Linux", "architecture": "x86_64", "libc": f"glibc {version}"}
        facts.write_text(json.dumps(content))
        assert requirement_findings(fake, tmp_path, environment) == expected
    facts.write_text("{")
    with pytest.raises(
        ConfigError, match=r"machine_facts\.json: .* call env/setup.sh with RELAX_FA"
    ):
        requirement_findings(fake, tmp_path, environment)


def test_this_host_counts_if_it_is_the_only_node(
    fake: FakeSlurm, tmp_path: Path, environment: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = read_facts(with_driver=False)._replace(libc="glibc 2.28", architecture="x86_64")
    monkeypatch.setattr(machine, "read_facts", lambda **_: old)
    (line,) = requirement_findings(fake, tmp_path, environment)
    assert line.startswith("warning: glibc 2.28 found") and "doctor --deep checks the nodes" in line
    fake.set(nodes=[f"node1|main*|idle|8|64000|{socket.gethostname()}|gpu:4"])
    (line,) = requirement_findings(fake, tmp_path, environment)
    assert line.startswith("error: glibc 2.28 found") and line.endswith(
        "(this host, the only node)"
    )
