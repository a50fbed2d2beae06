"""A test session that is ended, by whatever means, leaves no process, user, folder or shared
memory."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.effort import effort
from tests.guardian import (
    END_S,
    MEMORY,
    Order,
    has_mark,
    new_mark,
    remove_memory,
    session_processes,
)
from tests.helpers.slurm_sandbox import requires_sandbox
from tests.requirements import requires

pytestmark = pytest.mark.slurm

ROOT = Path(__file__).resolve().parents[2]
START_S = 120.0
STOP_S = 3 * END_S
HOLDERS = {"cheap": "test_holds_daemons_a_user_and_memory", "run": "test_holds_a_run"}
"""Name of a record -> the test of `held_session.py` that writes it. In `env/test.sh --all` also a
whole run."""
ENDINGS: dict[str, Callable[[subprocess.Popen], None]] = {
    "kill -9 of the controller": lambda process: process.kill(),
    "Ctrl-C": lambda process: os.killpg(process.pid, signal.SIGINT),
    "a closed terminal": lambda process: os.killpg(process.pid, signal.SIGHUP),
    "kill -9 of all": lambda process: os.killpg(process.pid, signal.SIGKILL),
}


def await_true(condition: Callable[[], bool], seconds: float, event: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {event}"
        time.sleep(0.1)


@pytest.mark.root
@pytest.mark.parametrize("ending", [*ENDINGS][: effort(1, len(ENDINGS))])
def test_a_session_that_is_ended_leaves_nothing(ending: str, tmp_path: Path) -> None:
    requires_sandbox()
    names = [*HOLDERS][: effort(1, len(HOLDERS))]
    if "run" in names:
        requires("torch", "megatron")
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        f"--basetemp={tmp_path / 'base'}",
    ]
    with log.open("wb") as output:
        process = subprocess.Popen(
            # A shell's background job ignores Ctrl-C, and its children inherit that.
            [
                "env",
                "--default-signal=INT,HUP",
                *command,
                "-n",
                str(len(names)),
                *(f"tests/project/held_session.py::{HOLDERS[name]}" for name in names),
            ],
            cwd=ROOT,
            env=os.environ | {"RELAX_HELD": str(tmp_path)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    files = [tmp_path / f"{name}.json" for name in names]
    await_true(
        lambda: all(file.exists() for file in files) or process.poll() is not None,
        START_S,
        "tests hold what they can",
    )
    assert process.poll() is None, log.read_text()
    records = [json.loads(file.read_text()) for file in files]
    session, folder = records[0]["mark"].rpartition("/")[0], Path(records[0]["session"])

    def has_daemons_and_job() -> bool:
        programs = set()
        for process in session_processes(session, str(folder)):
            with suppress(psutil.NoSuchProcess):
                programs.add(process.name())
        return programs >= {"munged", "slurmctld", "slurmd", "sleep", "tail"}

    await_true(has_daemons_and_job, START_S, "the sandbox starts its job")
    held = [
        Path(path) for record in records for path in (record["memory"], record["staging"]) if path
    ]
    assert all(path.exists() for path in held)

    ENDINGS[ending](process)
    process.wait(STOP_S)
    await_true(lambda: not folder.exists(), STOP_S, "the guardian removes the session's folder")
    assert [path for path in held if path.exists()] == []
    assert session_processes(session, str(folder)) == []
    users = {record["user"] for record in records} - {"", pwd.getpwuid(os.getuid()).pw_name}
    assert not users.intersection(entry.pw_name for entry in pwd.getpwall())
    assert not users.intersection(
        process.info["username"] for process in psutil.process_iter(["username"])
    )


def test_memory_of_others_stays(tmp_path: Path) -> None:
    session = tmp_path / "session"
    session.mkdir()
    folders = [
        MEMORY / f"{session.name}-{tmp_path.name}",
        MEMORY / f"relax-{os.getuid()}-{tmp_path.name}",
    ]
    files = [MEMORY / f"psm_{tmp_path.name}{index}" for index in range(3)]
    try:
        for folder in folders:
            folder.mkdir()
        for file in files:
            file.touch()
        with files[0].open():
            remove_memory(Order(new_mark(""), str(session), [files[1].name]))
        assert [path.exists() for path in (*folders, *files)] == [False, True, True, True, False]
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        for file in files:
            file.unlink(missing_ok=True)


def test_marks_of_workers_belong_to_their_controller_alone() -> None:
    controller, other = new_mark(""), new_mark("")
    worker = new_mark(controller)
    assert has_mark(worker, controller) and has_mark(controller, controller)
    assert not has_mark(worker, other)
    assert not has_mark(controller, worker)
    assert not has_mark(f"{controller}x", controller)
