"""A Slurm that is made up: sbatch, squeue, scontrol, scancel, sacct, sinfo and srun on PATH, slow,
failing or lying.

`FakeSlurm` puts them there; what they answer comes from a JSON file that the test changes at any
time. This file is also the program behind every one of them: `python fake_slurm.py STATE PROGRAM
ARGUMENTS...`.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

PROGRAMS = ("sbatch", "squeue", "scontrol", "scancel", "sacct", "sacctmgr", "sinfo", "srun")
JOB_FIELDS = {
    "A": "id",
    "T": "state",
    "D": "nodes",
    "N": "node_list",
    "L": "left",
    "M": "used",
    "r": "reason",
    "j": "name",
}
PARTITION = {
    "PartitionName": "main",
    "Default": "YES",
    "MaxNodes": "UNLIMITED",
    "MaxTime": "1-00:00:00",
    "State": "UP",
}
CONFIG = {
    "AccountingStorageType": "accounting_storage/none",
    "JobRequeue": "1",
    "KillWait": "60 sec",
    "MpiDefault": "none",
    "PreemptMode": "OFF",
    "SchedulerParameters": "(null)",
    "SchedulerType": "sched/backfill",
    "SlurmdTimeout": "300 sec",
}


class FakeSlurm:
    """A cluster of four nodes with 4 GPUs, 8 CPUs and 64000 MiB each, in one partition, until told
    otherwise."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bin, self._state, self._calls = (
            folder / "bin",
            folder / "slurm.json",
            folder / "calls.jsonl",
        )
        self.bin.mkdir(parents=True)
        for program in PROGRAMS:
            self._install(program)
        nodes = [f"node{n}|main*|idle|8|64000|host{n}|gpu:4" for n in range(1, 5)]
        self._save(
            {
                "rules": [],
                "jobs": {},
                "nodes": nodes,
                "partitions": [PARTITION],
                "config": CONFIG,
                "next": 100,
            }
        )
        # Nothing else may be found there, so that a program that is taken away is missing.
        monkeypatch.setenv("PATH", str(self.bin))
        monkeypatch.setenv("USER", "somebody")

    def answer(
        self, program: str, out: str = "", *, match: str = "", times: int = -1, **how: Any
    ) -> None:
        """Calls of ``program`` with ``match`` in their arguments print ``out``, ``times`` often
        (-1: always).

        ``how``: err (to stderr), code (exit code), sleep_s (before the answer). What is told last
        counts.
        """
        rule = {"program": program, "match": match, "times": times, "out": out, **how}
        state = self.state
        self._save(state | {"rules": [rule, *state["rules"]]})

    def set(self, **changes: Any) -> None:
        """Replace jobs, nodes, partitions, or next; ``config`` is merged."""
        state = self.state
        if "config" in changes:
            changes["config"] = state["config"] | changes["config"]
        self._save(state | changes)

    def remove(self, program: str) -> None:
        """As where Slurm's module is not loaded."""
        (self.bin / program).unlink()

    def calls(self, program: str) -> list[dict[str, Any]]:
        """{"argv", "env"} of every call so far."""
        lines = self._calls.read_text().splitlines() if self._calls.exists() else []
        return [call for call in map(json.loads, lines) if call["program"] == program]

    def run(self, argv: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """In place of `subprocess.run`, for tests of many calls: the same answers without a process
        each."""
        reply = answer(self._state, argv[0], argv[1:])
        return subprocess.CompletedProcess(argv, reply.code, reply.out, reply.err)

    @property
    def state(self) -> dict[str, Any]:
        """What the programs answer from."""
        return json.loads(self._state.read_text())

    def _save(self, state: dict[str, Any]) -> None:
        self._state.write_text(json.dumps(state))

    def _install(self, program: str) -> None:
        path = self.bin / program
        command = f"'{sys.executable}' -S -E '{Path(__file__).resolve()}' '{self._state}' {program}"
        path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        path.chmod(0o755)


class Reply(Exception):
    """How a fake program ends."""

    def __init__(self, out: str = "", err: str = "", code: int = 0) -> None:
        super().__init__(out)
        self.out, self.err, self.code = out, err, code


def answer(state_path: Path, program: str, argv: list[str]) -> Reply:
    """One call; the lock makes calls of several threads follow each other."""
    with state_path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with state_path.with_name("calls.jsonl").open("a") as log:
            log.write(
                json.dumps({"program": program, "argv": argv, "env": dict(os.environ)}) + "\n"
            )
        state = json.loads(state_path.read_text())
        rule = _rule(state, program, " ".join(argv))
        try:
            reply = (
                Reply(rule["out"], rule.get("err", ""), rule.get("code", 0))
                if rule
                else _reply(state, program, argv)
            )
        except Reply as ended:
            reply = ended
        state_path.write_text(json.dumps(state))
    time.sleep(rule.get("sleep_s", 0) if rule else 0)
    return reply


def main(state_path: Path, program: str, argv: list[str]) -> int:
    """Be one of the programs."""
    reply = answer(state_path, program, argv)
    sys.stdout.write(reply.out)
    sys.stderr.write(reply.err)
    return reply.code


def _rule(state: dict, program: str, words: str) -> dict | None:
    for rule in state["rules"]:
        if rule["program"] == program and rule["match"] in words and rule["times"] != 0:
            rule["times"] -= 1 if rule["times"] > 0 else 0
            return rule
    return None


def _reply(state: dict, program: str, argv: list[str]) -> Reply:
    if "--version" in argv:
        return Reply("slurm 22.05.8\n")
    return globals()[f"_{program}"](state, argv)


def _sbatch(state: dict, argv: list[str]) -> Reply:
    if "--test-only" in argv:
        return Reply(
            err="sbatch: Job 1 to start at 2030-01-01T00:00:00 using 1 processors on nodes node1\n"
        )
    job, options = (
        str(state["next"]),
        dict(word[2:].split("=", 1) for word in argv if word.startswith("--") and "=" in word),
    )
    state["next"] += 1
    state["jobs"][job] = {
        "state": "PENDING",
        "name": options.get("job-name", "job"),
        "comment": options["comment"],
    }
    return Reply(f"{job}\n")


def _squeue(state: dict, argv: list[str]) -> Reply:
    asked = next(
        (word.removeprefix("--jobs=").split(",") for word in argv if word.startswith("--jobs=")),
        None,
    )
    form = next(word.removeprefix("--format=") for word in argv if word.startswith("--format="))
    lines = []
    for job, fields in state["jobs"].items():
        leader = fields.get("het", job).partition("+")[0]
        if asked is not None and job not in asked and leader not in asked:
            continue
        if "--steps" in argv:
            lines += [f"{step}|{name}" for step, name in fields.get("steps", {}).items()]
        else:
            lines.append(_format(form, job, fields))
    known = {job for job in asked or [] if job in state["jobs"]}
    if asked and not known:
        raise Reply(err="slurm_load_jobs error: Invalid job id specified\n", code=1)
    return Reply("".join(f"{line}\n" for line in lines))


def _format(form: str, job: str, fields: dict) -> str:
    values = {
        "nodes": 1,
        "node_list": "",
        "used": "0:07",
        "left": "10:00",
        "reason": "None",
        "state": "PENDING",
        "name": "job",
    }
    values |= fields | {"id": job}
    shown = {letter: str(values[name]) for letter, name in JOB_FIELDS.items()}
    shown |= {"i": fields.get("het", job), "k": fields.get("comment", "")}
    return re.sub(r"%(\w)", lambda found: shown[found[1]], form)


def _scancel(state: dict, argv: list[str]) -> Reply:
    job = argv[-1]
    if not any(word.startswith("--signal") for word in argv):
        state["jobs"] = {
            name: fields
            for name, fields in state["jobs"].items()
            if job not in (name, fields.get("het", ""))
        }
    return Reply()


def _scontrol(state: dict, argv: list[str]) -> Reply:
    words = [word for word in argv if not word.startswith("-")]
    if words[:2] == ["show", "config"]:
        return Reply("".join(f"{key:<24}= {value}\n" for key, value in state["config"].items()))
    if words[:2] == ["show", "partition"]:
        return Reply(
            "".join(
                " ".join(f"{key}={value}" for key, value in p.items()) + "\n"
                for p in state["partitions"]
            )
        )
    if words[:2] == ["show", "hostnames"]:
        return Reply("".join(f"{name}\n" for name in _hostnames(words[2])))
    if words[0] in ("requeue", "hold", "release") and words[1] in state["jobs"]:
        state["jobs"][words[1]]["state"] = "PENDING"
        return Reply()
    return Reply(err=f"Invalid job id specified for job {words[-1]}\n", code=1)


def _hostnames(text: str) -> list[str]:
    found = re.fullmatch(r"(.*)\[(.*)\]", text)
    if not found:
        return text.split(",")
    ranges = [part.split("-") for part in found[2].split(",")]
    return [
        f"{found[1]}{n}" for bounds in ranges for n in range(int(bounds[0]), int(bounds[-1]) + 1)
    ]


def _sinfo(state: dict, argv: list[str]) -> Reply:
    return Reply("".join(f"{line}\n" for line in state["nodes"]))


def _srun(state: dict, argv: list[str]) -> Reply:
    if "--mpi=list" in argv:
        return Reply(
            err="MPI plugin types are...\n\tpmix\n\tnone\n\tpmi2\nspecific pmix plugin versions "
            "available: pmix_v4\n"
        )
    return Reply()


def _sacct(state: dict, argv: list[str]) -> Reply:
    return Reply(err="Slurm accounting storage is disabled\n", code=1)


def _sacctmgr(state: dict, argv: list[str]) -> Reply:
    return Reply(err="You are not running a supported accounting_storage plugin\n", code=1)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
