"""`relax-hpc check`: ports, paths, devices, programs and Slurm jobs that the machine does not
have."""

from __future__ import annotations

import errno
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.machine import own_environment
from relax_hpc.base.machine.facts import read_facts
from relax_hpc.base.machine.gpu_vendors import GpuMemory
from relax_hpc.base.machine.gpu_vendors.nvidia import Nvidia
from relax_hpc.commands.program import main
from relax_hpc.config import load
from relax_hpc.ops.checks import groups, machine
from relax_hpc.ops.checks.settings import check, check_request
from tests.helpers.run_helpers import QUICKSTART


def test_busy_port(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        findings = check(
            load([QUICKSTART], {"run_dir": str(tmp_path / "run"), "rollout.engine.port": port})
        )
    assert findings == [
        f"rollout.engine.port: found {port}, but {port} is in use; name another, or 0 for free ones"
    ]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("model.path", "closed/m"),
        ("model.reference_path", "closed/m"),
        ("data.train", "closed/rows.jsonl"),
        ("data.eval.test", "closed/rows"),
        ("run_dir", "closed/run"),
        ("run_dir", "n" * 300),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, name: str
) -> None:
    stat = os.stat

    def refuse(path: Any, **settings: Any) -> os.stat_result:
        if "/closed/" in os.fsdecode(path):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), os.fsdecode(path))
        return stat(path, **settings)

    # Root may enter any folder.
    monkeypatch.setattr(os, "stat", refuse)
    path = tmp_path / name
    findings = check(load([QUICKSTART], {key: str(path)}))
    [finding] = [text for text in findings if "found '" in text and " but /" in text]
    assert finding.startswith(f"{key}: found '{path}', but {path}: ")


def test_what_slurm_cannot_be_asked_for_is_a_finding_too(tmp_path: Path) -> None:
    over = {"run_dir": str(tmp_path / "run"), "layout": "het", "site.cpu_nodes": False}
    (line,) = check_request(load([QUICKSTART], over))
    assert line.startswith("groups.rollout.resources.nodes: found 1 for component 0 of a het job")
    assert check(load([QUICKSTART], over)) == [], "a user's own script may have another hub there"
    over = {"run_dir": str(tmp_path / "run"), "layout": "jobs", "site.options.nodes": "2"}
    (line,) = check_request(load([QUICKSTART], over))
    assert line == (
        "site.options.nodes: found '2', but it is set by relax_hpc; set "
        "groups.<group>.resources.nodes instead"
    )


def test_a_device_is_looked_for_where_the_run_will_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = {"run_dir": str(tmp_path / "run"), "model.device": "cuda"}
    monkeypatch.setattr(groups, "find_vendor", lambda: None)
    assert check(load([QUICKSTART], over)) == [
        "model.device: found cuda, but this machine has no GPU (/dev/nvidia0 or /dev/kfd); set cpu"
    ]
    assert check(load([QUICKSTART], over | {"site.name": "cluster"})) == [], (
        "a job's node, not this one"
    )
    without = check(
        load([QUICKSTART], over | {"layout": "het", "groups.actor.resources.gpus_per_node": 1})
    )
    assert [line.split(":")[0] for line in without] == [
        f"groups.{name}.resources.gpus_per_node" for name in ("rollout", "actor_fwd")
    ]


def test_a_run_on_this_machine_needs_the_minimum_requirements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    facts = read_facts(with_driver=False)._replace(open_files=64)
    for module in (own_environment, machine):
        monkeypatch.setattr(module, "read_facts", lambda **_: facts)
    run_dir, line = tmp_path / "run", "nofile limit (ulimit -Hn) 64 found, 4096 needed"
    over = {"run_dir": str(run_dir)}
    for changes in ({}, {"site.python": "/usr/bin/python3"}, {"site.python": "no-python"}):
        (finding,) = check(load([QUICKSTART], over | changes))
        assert finding.startswith(line)
    monkeypatch.delenv("SLURMD_NODENAME", raising=False)
    for changes in ({"layout": "het"}, {"site.name": "cluster"}):
        assert not [text for text in check(load([QUICKSTART], over | changes)) if line in text]
    for option in ("--steps=1", "--site.name=cluster"):
        # With a site too, `run` starts the roles here.
        assert main(["run", "--config", str(QUICKSTART), f"--run_dir={run_dir}", option]) == 78
        assert line in capsys.readouterr().err and not run_dir.exists()
    # In a job on its node.
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    (finding,) = check(load([QUICKSTART], over | {"site.name": "cluster"}))
    assert finding.startswith(line)


class LoadedDriver(Nvidia):
    """A machine with a driver, whose tool is on PATH and has half a second."""

    def has_driver(self, root: Path) -> bool:
        return True

    def read_memory(self, timeout_s: float = 0.5) -> list[GpuMemory]:
        return super().read_memory(timeout_s)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("sleep 300", "nvidia-smi gave no answer within 0.5 s"),
        ("echo 'Unable to determine'; exit 15", "nvidia-smi failed with exit code 15 (Unable to d"),
        ("echo 0, GPU-1, 80000, 4", ""),
    ],
)
def test_gpus_that_do_not_answer_end_a_run_before_it_starts(
    script: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tool = tmp_path / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    vendor = LoadedDriver()
    monkeypatch.setattr(machine, "gpu_vendor", lambda _: vendor)
    monkeypatch.setattr(groups, "find_vendor", lambda: vendor)
    run_dir = tmp_path / "run"
    over = {"run_dir": str(run_dir), "model.device": "cuda"}
    findings = check(load([QUICKSTART], over))
    assert [line for line in findings if "an answer needed by all GPUs" in line] == (
        [findings[-1]] if reason else []
    )
    if reason:
        started = time.monotonic()
        arguments = [f"--run_dir={run_dir}", "--model.device=cuda"]
        assert main(["run", "--config", str(QUICKSTART), *arguments]) == 78
        assert time.monotonic() - started < 60
        assert f"NVIDIA driver: {reason}" in capsys.readouterr().err and not run_dir.exists()


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"environment.options": {"command": ["python", "agent.py"]}}, None),
        (
            {},
            "environment.options: found command None, allowed with environment.kind agent: a list "
            "of words",
        ),
        ({"environment.options": {"command": "agent.py"}}, "found command 'agent.py', allowed"),
        (
            {"environment.options": {"comand": ["x"]}},
            "found comand, allowed with environment.kind agent: command, env",
        ),
        (
            {"environment.options": {"command": ["no-such-program"]}},
            "environment.options.command: found 'no-such-program', which is not a program",
        ),
        (
            {"environment.options": {"command": ["python"], "chat_template": "/no/such.jinja"}},
            "environment.options.chat_template: found '/no/such.jinja', allowed: model, or a Jinja "
            "file",
        ),
        (
            {"environment.options": {"command": ["python"]}, "data.chat_template": "model"},
            "data.chat_template: found 'model' with environment.kind agent, allowed: none",
        ),
        (
            {"environment.kind": "", "groups.hub.roles": ["advantages", "gateway"]},
            "groups.hub.roles: found gateway with environment.kind ''",
        ),
        (
            {
                "environment.options": {"command": ["python"]},
                "groups.actor.roles": ["actor", "gateway"],
            },
            "groups: found role gateway in actor, allowed: hub",
        ),
    ],
)
def test_programs_that_play_episodes_are_looked_at(
    tmp_path: Path, over: dict[str, Any], says: str | None
) -> None:
    config = load(
        [QUICKSTART], {"run_dir": str(tmp_path / "run"), "environment.kind": "agent"} | over
    )
    assert ("gateway" in config.groups["hub"].roles) == ("groups.actor.roles" not in over)
    findings = check(config)
    assert (len(findings) == 1 and says in findings[0]) if says else findings == []


def test_a_hub_with_a_gateway_needs_no_gpu(tmp_path: Path) -> None:
    over = {
        "model.device": "cuda",
        "environment.kind": "agent",
        "environment.options": {"command": ["python"]},
    }
    cluster = QUICKSTART.parents[1] / "clusters" / "2-nodes.yaml"
    config = load(
        [QUICKSTART, cluster], {"run_dir": str(tmp_path / "run"), "site.interface": "lo"} | over
    )
    assert config.groups["hub"].roles == ["advantages", "gateway", "api"]
    assert not [finding for finding in check(config) if finding.startswith("groups.")]
