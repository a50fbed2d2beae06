"""A run that was interrupted, or killed as a whole, goes on where it was."""

from __future__ import annotations

import json
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import date
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.sandbox.processes import alive, command_line, until_gone
from relax_hpc.cluster.supervise.launch_records import all_ended, is_done
from relax_hpc.commands.run_setup import check_resumable, keep_date
from relax_hpc.config import dump, load, load_resolved
from relax_hpc.config.schema import Config
from relax_hpc.data.visits import prompt_at
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.training.weights.node_cache import staging_root
from tests.helpers.audit import audit, read_events
from tests.helpers.run_helpers import (
    LIGHT,
    Running,
    merged,
    queue_rows,
    queue_state,
    rollbacks,
    running,
    trained_steps,
    write_config,
)
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

STEPS = 16
EVERY = 3
OVER = merged(
    LIGHT,
    {
        "steps": STEPS,
        "checkpoint": {"every": EVERY},
        "actor": {"parallel": {"tensor": 2}},
        "model": {"tiny": {"num_key_value_heads": 2}},
    },
)
"""Two ranks under an MPI launcher: the signals and the ends of processes must pass through it."""
WAIT_S = 240.0


def everything(live: Running) -> list[psutil.Process]:
    """The supervisor and all that it started."""
    supervisor = psutil.Process(live.process.pid)
    return [supervisor, *supervisor.children(recursive=True)]


def command(directory: Path, *words: str) -> subprocess.CompletedProcess:
    """`relax-hpc run` on the run in `directory`, to its end."""
    base = [sys.executable, "-m", "relax_hpc", "run", "--config", str(directory / "config.yaml")]
    line = [*base, "--run_dir", str(directory / "run"), *words]
    return subprocess.run(line, capture_output=True, text=True, timeout=WAIT_S)


def test_interrupted_killed_and_damaged(tmp_path: Path) -> None:
    step = close_its_terminal(tmp_path)
    with running(tmp_path, OVER, None, "--resume") as live:
        assert_continues(live, step)
        older, newest = kill_everything(live)
    damage(live.run.checkpoints / newest["name"])
    with nohup(), running(tmp_path, OVER, None, "--resume") as live:
        live.wait_for_step(older["step"] + 1, WAIT_S)
        live.process.send_signal(signal.SIGHUP)
        live.finish(WAIT_S)
        logs = "".join(
            path.read_text() for path in (live.run.root / "logs" / "actor").glob("*/*.log")
        )
    (line,) = {line for line in logs.splitlines() if "does not verify" in line}
    assert newest["name"] in line and "damaged" in line
    assert [at for _, at in rollbacks(live.run)][-1] == older["step"]
    assert [row["step"] for row in trained_steps(live.run)] == list(range(STEPS))
    result = audit(live.run)
    assert result.problems == [] and set(result.dropped) <= {"rolled_back", "lost"}
    assert_prompts_of_tickets(live)
    assert_finished_run_says_so(tmp_path)


@contextmanager
def nohup() -> Iterator[None]:
    """What is started in the block ignores SIGHUP."""
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, former)


def close_its_terminal(directory: Path) -> int:
    """Start a run in a shell on a terminal, and close the terminal as the end of an ssh session
    does; the step that the run saved."""
    config, run_dir = str(write_config(directory / "config.yaml", OVER)), str(directory / "run")
    base = [sys.executable, "-m", "relax_hpc", "run"]
    command_line = shlex.join([*base, "--config", config, "--run_dir", run_dir])
    terminal, theirs = pty.openpty()
    os.set_blocking(terminal, False)
    shell = subprocess.Popen(["bash", "--norc", "-i"], preexec_fn=lambda: os.login_tty(theirs))
    os.close(theirs)
    live = Running(shell, RunDir(run_dir), directory / "output.txt")

    def has_trained() -> bool:
        with live.output.open("ab") as output, suppress(BlockingIOError):
            output.write(os.read(terminal, 1 << 16))
        return len(trained_steps(live.run)) > EVERY

    os.write(terminal, f"{command_line}\n".encode())
    live.wait_until(has_trained, f"step {EVERY} trained", WAIT_S)
    (supervisor,) = psutil.Process(shell.pid).children()
    family = [supervisor, *supervisor.children(recursive=True)]
    os.close(terminal)
    shell.wait(WAIT_S)
    until_gone(family, 60.0)
    assert not any(map(alive, family)) and not staging_root(live.run).exists()
    progress = queue_state(live.run).progress
    step = progress.complete_steps[-1]
    assert step == progress.trained_steps > EVERY, "saved at the edge of the step it was at"
    log = (live.run.root / "supervisor.log").read_text()
    assert "--resume" in log.splitlines()[-1], log
    return step


def assert_continues(live: Running, step: int) -> None:
    """Nothing that was saved is trained again, and the tickets go on."""
    live.wait_for_step(step + EVERY + 1, WAIT_S)
    assert [row["step"] for row in trained_steps(live.run)][: step + 2] == list(range(step + 2))
    assert trained_twice(live) == []


def trained_twice(live: Running) -> list[str]:
    """Samples with more than one "trained" event; before any step is rolled back there are none."""
    counts = Counter(event["id"] for event in read_events(live.run) if event["what"] == "trained")
    return [name for name, count in counts.items() if count > 1]


def kill_everything(live: Running) -> tuple[dict, dict]:
    """SIGKILL to all processes of a run at once; its last two checkpoints. The guard, in a session
    of its own, removes what they had in memory."""
    family = everything(live)
    supervisor = command_line(family[0])
    (guard,) = [process for process in family[1:] if command_line(process) == supervisor]
    assert staging_root(live.run).exists()
    for process in family:
        if process != guard:
            process.send_signal(signal.SIGKILL)
    assert live.wait(30.0) == -signal.SIGKILL
    psutil.wait_procs(family, timeout=30.0)
    until_gone(family, 60.0)
    assert not any(map(alive, family)) and not staging_root(live.run).exists()
    older, newest = queue_state(live.run).progress.parts("actor")[-2:]
    return older, newest


def damage(checkpoint: Path) -> None:
    """Cut the largest file in half, as a full disk does."""
    largest = max((path for path in checkpoint.iterdir()), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def assert_prompts_of_tickets(live: Running) -> None:
    """Each ticket trained the prompt that it has in every run of this seed: the data went on where
    they were."""
    ids = [
        json.loads(line)["id"] for line in (live.run.data / "train.jsonl").read_text().splitlines()
    ]
    config = load_resolved(live.run.root)
    found = {row["ticket"]: row["prompt_id"] for row in queue_rows(live.run).values()}
    tickets = range(STEPS * config.prompts_per_step)
    assert found == {
        t: ids[prompt_at(t, 0, len(ids), config.seed, config.data.shuffle)] for t in tickets
    }


def assert_finished_run_says_so(tmp_path: Path) -> None:
    again = command(tmp_path, "--resume")
    assert again.returncode == 0 and "finished already" in again.stdout and again.stderr == ""
    refused = command(tmp_path)
    assert refused.returncode == EXIT_CONFIG and refused.stderr.count("\n") == 1
    assert "already holds a run" in refused.stderr and "--resume" in refused.stderr


def test_a_run_keeps_the_date_that_its_chat_templates_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    began, plain = load([], {"data.chat_template": "model"}), Config()
    for config in (began, plain):
        keep_date(run, config)
    assert began.data.template_date == str(date.today()) and plain.data.template_date == ""
    began.data.template_date = "2026-01-31"
    dump(began, run.config)
    resumed = load([], {"data.chat_template": "model"})
    keep_date(run, resumed)
    assert resumed.data.template_date == "2026-01-31"
    chosen = load([], {"data.chat_template": "model", "data.template_date": "2025-12-24"})
    keep_date(run, chosen)
    assert chosen.data.template_date == "2025-12-24"


def test_sets_in_another_order_would_give_tickets_other_rows(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    sets = {"math": "math.jsonl", "code": "code.jsonl"}
    dump(load([], {"data.train_sets": sets}), run.config)
    turned = load([], {"data.train_sets": dict(reversed(sets.items()))})
    with pytest.raises(ConfigError, match="found code, math, a run keeps the order math, code"):
        check_resumable(run, turned)


def test_a_finished_run_with_more_steps_has_nobody_who_is_done(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    config = Config(steps=3)
    dump(config, run.config)
    for role in ("rollout", "actor"):
        mark = run.exit_mark(role, claim_incarnation(run, role), role)
        mark.parent.mkdir(parents=True)
        write_exit_mark(mark)
    run.logs("hub", 1).mkdir(parents=True)
    run.exit_mark("hub", 1, "advantages").touch()
    run.finished.touch()
    check_resumable(run, Config(steps=3))
    assert run.finished.exists() and is_done(run, "actor", "actor")
    check_resumable(run, Config(steps=4))
    assert not run.finished.exists()
    assert not is_done(run, "actor", "actor") and not is_done(run, "rollout", "rollout")
    assert all_ended(run, config, "actor")
