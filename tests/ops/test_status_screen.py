"""`relax-hpc status` on terminals of any size, and tables whose cells stand under their titles."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import termios
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.base.rundir import RunDir, write_json
from relax_hpc.base.terminal_text import columns_of
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.submissions import Ledger, Submission
from relax_hpc.commands.program import main
from relax_hpc.ops.observe.report_view import lines as report_lines
from relax_hpc.ops.observe.status import status
from relax_hpc.ops.observe.status_screen import fit, screen_lines
from relax_hpc.ops.observe.status_view import lines, time_of_day
from tests.helpers.command_helpers import begin, make_run
from tests.helpers.fake_slurm import FakeSlurm

CLEAR = "\x1b[H\x1b[J"


def group(state: str = "running", **fields: Any) -> dict[str, Any]:
    """Status of a group with long values."""
    return {
        "state": state,
        "reason": "",
        "incarnation": 12,
        "job": "12345678",
        "nodes": "node[0101-0104,0107]",
        "ranks": 32,
        "age_s": 12345.0,
        "time_left_s": 54321.0,
        "last_beat_s": 0.4,
        "longest_gap_s": 3.0,
        "doing": "",
        "puts": 1234,
        "step": 88,
        "ahead": [],
    } | fields


def full_status(**fields: Any) -> dict[str, Any]:
    """A status with a line of every kind."""
    return {
        "run_dir": "/lustre/project/p12345/users/somebody/experiments/grpo-qwen3-8b-second-try",
        "state": "running",
        "time": 1_800_000_000.0,
        "finished": False,
        "hub": True,
        "squeue": True,
        "stop": {},
        "trained_steps": 88,
        "steps": 1000,
        "eta_s": 4000.0,
        "reward": 0.5,
        "tokens_per_s": 12345.0,
        "held_out": {"step": 50, "scores": {"test/math": 0.8333}},
        "checkpoint": {"step": 50, "age_s": 70.0},
        "unsaved": None,
        "disk": [],
        "nothing_learned": "",
        "preparing": "",
        "waits": [],
        "failures": [
            {"headline": "reward_exception: KeyError: 'solution' at /home/me/rewards.py:3"}
        ],
        "dropped": {"reward_exception": 4, "filtered": 17},
        "left_out": {"over_long": 3},
        "noted": {"engine_fault/rollout": 2},
        "weights": {"newest": "i000001-v000088", "lag": 1},
        "without": {},
        "events": [["waiting", "actor"], ["no_progress", ""]],
        "trackers": [],
        "depth": {"generating": 0, "ready": 3},
        "oldest_s": {"generating": 0.0, "ready": 12.0},
        "waiting": ["rollout-0: admit: rollout.groups_per_request"] * 4,
        "shares": {"steps": 20, "roles": {"actor": {"at": {"wait": 0.6, "train": 0.4}, "for": {}}}},
        "jobs": [],
        "excluded_nodes": [],
        "groups": {name: group() for name in ("hub", "rollout", "actor", "actor_fwd", "reference")},
    } | fields


def assert_is_readable(frame: list[str], width: int, height: int) -> None:
    """The frame fits, and what people watch stands in its first lines."""
    assert len(frame) <= height and max(map(columns_of, frame)) <= width, frame
    top = "\n".join(frame[:5])
    for text in (
        "running",
        "step 88/1000  eta 1h06m",
        "reward 0.500",
        "test/math 0.833",
        "checkpoint: step 50",
    ):
        assert text in top, top


def assert_cells_under_titles(table: list[str]) -> None:
    """Each cell begins or ends where its title does."""
    titles = [(match.start(), match.end()) for match in re.finditer(r"\S+", table[0])]
    for line in table[1:]:
        for start, end in titles[:-1]:
            cell = line[start:end]
            assert cell.strip() and (cell[0] != " " or cell[-1] != " "), (table[0], line)
            assert start == 0 or line[start - 1] == " " or line[end : end + 1] in ("", " "), line


@given(width=st.integers(72, 250), height=st.integers(12, 80), count=st.integers(1, 60))
def test_a_status_fits_every_terminal(width: int, height: int, count: int) -> None:
    groups = {f"rollout-{number}": group() for number in range(count)}
    frame = screen_lines(full_status(groups={"hub": group(), **groups}), width, height)
    assert_is_readable(frame, width, height)


@given(
    width=st.integers(24, 250),
    height=st.integers(8, 80),
    scores=st.integers(0, 30),
    wide=st.booleans(),
)
def test_what_people_watch_is_on_every_screen(
    width: int, height: int, scores: int, wide: bool
) -> None:
    letters = "训练" if wide else "ab"
    held_out = {"step": 50, "scores": {f"test/{letters}{n}": 0.25 for n in range(scores)}}
    names = [f"rollout-{letters * 20}-{number}" for number in range(12)]
    run_status = full_status(
        run_dir=f"/home/{letters * 60}",
        held_out=held_out if scores else None,
        groups={name: group() for name in names},
        waits=[
            {"group": name, "why": f"{letters * 30} is queued", "since_s": 5.0, "spent": 1.0}
            | {"unit": "GPU", "left_s": 100.0}
            for name in names
        ],
    )
    frame = screen_lines(run_status, width, height)
    assert len(frame) <= height and max(map(columns_of, frame)) <= width
    text = "\n".join(frame)
    for part in ("running", "step 88/1000", "eta 1h06m", "end ", "reward 0.500", "held-out: "):
        assert part in text, text
    assert f"test/{letters}0" in text or not scores


def test_shares_of_time_stand_under_each_other() -> None:
    times = {"at": {"wait": 0.6, "train": 0.4}, "for": {"rollout": 0.6}}
    shares = {"steps": 20, "roles": {"actor": times, "actor_fwd": times}}
    frame = screen_lines(full_status(shares=shares), 79, 40)
    assert "  actor       waits for rollout 60%  train 40%" in frame
    assert "  actor_fwd   waits for rollout 60%  train 40%" in frame


def test_scores_that_do_not_fit_are_counted() -> None:
    scores = {f"set-{number}/accuracy": 0.25 for number in range(9)}
    frame = screen_lines(full_status(held_out={"step": 5, "scores": scores}), 79, 23)
    [first] = [number for number, line in enumerate(frame) if line.startswith("held-out: ")]
    shown = sum(line.count("accuracy") for line in frame)
    assert frame[first + 1].endswith(f"  +{9 - shown + 1}") and shown == 6


@pytest.mark.parametrize(
    ("end_s", "expected"), [(3600.0, r"\d\d:\d\d"), (86400.0, r"\w+ \d\d:\d\d")]
)
def test_an_end_on_another_day_has_the_day(end_s: float, expected: str) -> None:
    noon = time.mktime((2026, 3, 2, 12, 0, 0, 0, 0, -1))
    assert re.fullmatch(expected, time_of_day(noon + end_s, noon))
    assert time_of_day(noon + 30 * 86400.0, noon).startswith("01 Apr")


def test_colours_change_no_text() -> None:
    groups = {"hub": group(), "rollout": group("dead", reason="no sign for 90 s"), "a b": group()}
    screen = fit(full_status(groups=groups), 79, 23)
    painted = list(screen.painted("running"))
    assert [re.sub("\x1b\\[[0-9;]*m", "", line) for line in painted] == screen.lines()
    assert painted[0].startswith("\x1b[1;32m")
    assert sum("\x1b[31mdead\x1b[0m" in line for line in painted) == 1
    assert sum("\x1b[32mrunning\x1b[0m" in line for line in painted) >= 1
    assert any(line.startswith("\x1b[33mfirst failure") for line in painted)


def test_groups_that_do_not_run_come_first_where_not_all_fit() -> None:
    groups = {f"rollout-{number}": group() for number in range(40)}
    groups["rollout-39"] = group("restarting", reason="CUDA error: out of memory")
    frame = screen_lines(full_status(groups=groups), 79, 23)
    row = next(number for number, line in enumerate(frame) if line.startswith("GROUP"))
    assert frame[row + 1].startswith("rollout-39 restarting")
    assert re.fullmatch(r"\d+ more groups", frame[22])


@pytest.mark.parametrize("rows_left", [0, 1, 2, 3])
def test_groups_that_are_left_out_are_counted(rows_left: int) -> None:
    run_status = full_status(groups={f"rollout-{number}": group() for number in range(40)})
    frame = screen_lines(run_status, 199, 80)
    titles = next(number for number, line in enumerate(frame) if line.startswith("GROUP"))
    frame = screen_lines(run_status, 199, titles + rows_left)[titles:]
    assert len(frame) == rows_left
    assert not frame or frame[-1] == f"{41 - max(1, rows_left - 1)} more groups"


def test_columns_stand_under_their_titles() -> None:
    run_status = full_status()
    narrow, wide = screen_lines(run_status, 79, 23), screen_lines(run_status, 199, 49)
    for text in (list(lines(run_status)), narrow, wide):
        row = next(number for number, line in enumerate(text) if line.startswith("GROUP"))
        assert_cells_under_titles(text[row : row + 6])
    [titles] = [line for line in wide if line.startswith("GROUP")]
    names = "GROUP STATE INCARNATION JOB NODES RANKS AGE LEFT BEAT GAP WORK"
    assert " ".join(titles.split()) == names


def test_an_empty_queue_has_no_age() -> None:
    text = "\n".join(lines(full_status()))
    assert "queue: 0 prompt groups in generation, 3 waiting for training (oldest 12s)" in text


def test_restarts_of_a_report_are_whole_and_aligned() -> None:
    reason = (
        "EngineFault: dead: the server ended with code -9 while starting; see "
        + "/a/b" * 12
        + "/engine-0.log"
    )
    restart = {
        "group": "rollout-12",
        "incarnation": 3,
        "at_s": 100.0,
        "gap_s": 20.0,
        "fault": True,
        "why": reason,
    }
    empty = dict.fromkeys(("roles", "waits", "pace", "split", "goodput", "failures", "notes"), ())
    hours = {"unit": "node", "asked": 0.0}
    header = {
        "sentence": "",
        "lengths": None,
        "cost": {"groups": {}},
        "run_dir": "/r",
        "finished": False,
        "first_step": None,
        "wall_s": 1.0,
        "bottleneck": None,
    }
    text = list(report_lines(empty | header | {"hours": hours, "restarts": [restart, restart]}))
    start = next(number for number, line in enumerate(text) if line.startswith("RESTARTS"))
    column = text[start].index("WHY")
    assert all(line[column - 1] == " " and line[column] != " " for line in text[start + 1 :])
    assert " ".join(line[column:] for line in text[start + 1 :]) == f"{reason} {reason}"
    assert_cells_under_titles([text[start], text[start + 1]])


# -- a real terminal --


class PseudoTerminal:
    """A pseudo-terminal that the process's standard output is connected to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._reading, writing = pty.openpty()
        self._file = os.fdopen(writing, "w")
        self._text = bytearray()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        for name in ("stdout", "__stdout__"):
            monkeypatch.setattr(sys, name, self._file)
        for name in ("COLUMNS", "LINES"):
            monkeypatch.delenv(name, raising=False)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._reading, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def close(self) -> list[list[str]]:
        """What was shown each time that the screen was cleared, as lines."""
        self._file.close()
        self._thread.join()
        os.close(self._reading)
        text = self._text.decode().replace("\r\n", "\n")
        return [frame.removesuffix("\n").split("\n") for frame in text.split(CLEAR)[1:]]

    def _read(self) -> None:
        try:
            while block := os.read(self._reading, 65536):
                self._text += block
        except OSError:  # The other end is closed.
            return


@pytest.mark.parametrize(
    ("variables", "has_colours"),
    [
        ({"TERM": "xterm-256color", "NO_COLOR": ""}, True),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, False),
        ({"TERM": "vt100", "NO_COLOR": ""}, False),
        ({"TERM": "dumb", "NO_COLOR": ""}, False),
    ],
)
def test_watching_fits_the_terminal_and_follows_its_size(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    has_colours: bool,
) -> None:
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    run = make_run(tmp_path / ("a-long-name-of-a-run-" * 4), "local")
    for name in ("hub", "rollout", "actor", "actor_fwd"):
        begin(run, name)
    rows = [
        {"step": n, "time": 100.0 + 2 * n, "incarnation": 1, "reward/mean": 0.5} for n in range(5)
    ]
    rows.append({"step": 5, "time": 112.0, "incarnation": 1, "eval/test/math": 0.75})
    run.metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    terminal = PseudoTerminal(monkeypatch)
    terminal.resize(80, 24)
    sizes = [(200, 50), None]

    def sleep(seconds: float) -> None:
        """The user resizes the window once, then the run ends."""
        if size := sizes.pop(0):
            terminal.resize(*size)
        else:
            write_json(run.finished, {"steps": 10, "dropped": {}})

    monkeypatch.setattr(time, "sleep", sleep)
    assert main(["status", str(run.root), "--watch", "2"]) == 0
    painted = terminal.close()
    assert any("\x1b[" in line for line in painted[0]) == has_colours
    small, large, last = [
        [re.sub("\x1b\\[[0-9;]*m", "", line) for line in frame] for frame in painted
    ]
    for frame, width, height in ((small, 80, 24), (large, 200, 50)):
        assert len(frame) < height and max(map(len, frame)) < width, frame
        text = "\n".join(frame[:5])
        for expected in (
            "running",
            "step 5/10  eta 10s  reward 0.500",
            "held-out: test/math 0.750",
            "checkpoint: none",
        ):
            assert expected in text
    assert "LEFT" not in "\n".join(large), "no job of a local run has a time limit"
    assert "finished" in last[0]


def test_while_a_run_is_queued_each_group_shows_its_own_component(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, slurm = make_run(tmp_path / "run", "het"), FakeSlurm(tmp_path / "slurm", monkeypatch)
    Ledger(run).add(Submission("11", "run", attempt=1))
    jobs = {
        "11": {"state": "RUNNING", "name": "hub-run", "het": "11+0", "node_list": "cpu[1-2]"},
        "12": {"state": "RUNNING", "name": "rollout-run", "het": "11+1", "node_list": "gpu[1-2]"},
        "13": {"state": "RUNNING", "name": "actor-run", "het": "11+2", "node_list": "gpu3"},
    }
    slurm.set(jobs=jobs)
    groups = status(RunDir(run.root), 0.05, Slurm(30.0, 1))["groups"]
    jobs_and_nodes = {
        name: (groups[name]["job"], groups[name]["nodes"]) for name in ("hub", "rollout", "actor")
    }
    assert jobs_and_nodes == {
        "hub": ("11", "cpu[1-2]"),
        "rollout": ("12", "gpu[1-2]"),
        "actor": ("13", "gpu3"),
    }
