"""Mistakes in the configuration, the prompts and the reward: they are counted, or one line names
them."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_NO_PROGRESS
from relax_hpc.base.metrics.first_failures import read_failures
from relax_hpc.commands.program import main
from relax_hpc.ops.observe.status import status
from relax_hpc.ops.observe.status_view import lines as status_lines
from tests.helpers.audit import audit, read_events
from tests.helpers.faulty_data import BAD_LINES, make_data
from tests.helpers.run_helpers import (
    LIGHT,
    Running,
    merged,
    queue_rows,
    running,
    trained_steps,
    write_config,
)
from tests.requirements import requires

pytestmark = pytest.mark.run

WAIT_S = 240.0
BAD_FLAG = {"kind": "sglang", "flags": {"max_total_token": 4096}}


# -- before a process is started -------------------------------------------------------------------


def busy_port() -> socket.socket:
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    return listener


@pytest.mark.parametrize(
    ("options", "texts"),
    [
        (
            ["--model.path", "/no/such/model"],
            ["model.path: found '/no/such/model'", "not a directory"],
        ),
        (
            ["--actor.parallel.tensor", "4"],
            ["actor.parallel.tensor: found 4", "num_attention_heads, 2"],
        ),
        (
            ["--algorithm.mini_batches", "3"],
            ["algorithm.mini_batches: found 3", "divisor of prompts_per_step, 4"],
        ),
        (
            ["--rollout.engine.kind", "sglang", "--rollout.engine.port", "BUSY"],
            ["rollout.engine.port: found BUSY", "in use", "0 for free ones"],
        ),
    ],
    ids=["model", "tensor", "batch", "port"],
)
def test_impossible_settings_start_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], texts: list[str]
) -> None:
    """BUSY is a port that is in use."""
    with busy_port() as listener:
        port = str(listener.getsockname()[1])
        config = write_config(tmp_path / "config.yaml")
        command = ["run", "--config", str(config), "--run_dir", str(tmp_path / "run")]
        command += [option.replace("BUSY", port) for option in options]
        code = main(command)
    captured = capsys.readouterr()
    assert code == EXIT_CONFIG and captured.out == ""
    assert_error_line(captured.err, *[text.replace("BUSY", port) for text in texts])
    assert not (tmp_path / "run").exists()


def assert_error_line(output: str, *texts: str) -> None:
    """Check that ``output`` is one line with an error, which has all ``texts``."""
    assert output.startswith("relax-hpc: error: ") and output.count("\n") == 1, output
    for text in texts:
        assert text in output


def run_to_end(
    directory: Path, settings: dict[str, Any], code: int, *texts: str
) -> subprocess.CompletedProcess[str]:
    """Let `relax-hpc run` fail with an exit code and an error line that has all ``texts``."""
    config = write_config(directory / "config.yaml", settings)
    command = [sys.executable, "-m", "relax_hpc", "run", "--config", str(config)]
    command += ["--run_dir", str(directory / "run")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S)
    assert result.returncode == code, result.stdout + result.stderr
    assert_error_line(result.stderr, *texts)
    return result


def test_too_many_bad_lines_start_nothing(tmp_path: Path) -> None:
    requires("torch")
    result = run_to_end(
        tmp_path,
        make_data(tmp_path, list(BAD_LINES.values())),
        EXIT_CONFIG,
        "train.jsonl: 4 of 44 lines are bad",
        "broken_json (first line 41",
        "max_bad",
    )
    assert "started" not in result.stdout
    assert not (tmp_path / "run").exists(), "the user can repeat the same command"


def test_an_unknown_engine_flag_starts_nothing(tmp_path: Path) -> None:
    requires("sglang")
    run_to_end(
        tmp_path,
        {"rollout": {"engine": BAD_FLAG}},
        EXIT_CONFIG,
        "rollout.engine.flags.max_total_token",
        "did you mean max_total_tokens?",
    )
    assert not (tmp_path / "run").exists()


# -- faults that are counted -----------------------------------------------------------------------


def test_bad_lines_and_failures_of_a_reward_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("mpi", "torch", "megatron", "transformers")
    faults = {1: "raise", 6: "exit", 9: "hang"}
    reward = {"rollout": {"reward": "faulty_rewards:faulty", "reward_timeout_s": 3.0}}
    data = make_data(tmp_path, list(BAD_LINES.values()), faults)
    settings = merged(LIGHT, data | reward)
    settings["data"]["max_bad_share"] = 0.2
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with running(tmp_path, settings) as live:
        live.finish(WAIT_S)
    assert live.incarnations("rollout") == 1, "a fault of a reward does not end the role"
    assert_bad_lines_are_counted(live)
    assert_failures_are_counted(live)
    assert_first_failures_are_shown(live, tmp_path / "faulty_rewards.py")
    prompts = {row["ticket"]: row["prompt_id"] for row in queue_rows(live.run).values()}
    assert {prompts[ticket] for ticket in range(12)}.isdisjoint({"p101", "p106", "p109"})
    # Tickets without a fault keep their prompts.
    assert prompts[0] == "p100" and prompts[2] == "p102"


def assert_bad_lines_are_counted(live: Running) -> None:
    bad_prompts = [event for event in read_events(live.run) if event["what"] == "bad_prompt"]
    reasons = {event["id"]: event["reason"] for event in bad_prompts}
    assert reasons == {f"line {line}": reason for line, reason in enumerate(BAD_LINES, start=41)}
    assert "note: data.train: 4 of 44 rows are skipped: 1 " in live.output.read_text()
    assert "rows left out: " in "\n".join(status_lines(status(live.run)))
    last = trained_steps(live.run)[-1]
    assert [last[f"queue/bad_prompt_{reason}"] for reason in BAD_LINES] == [1, 1, 1, 1]


def assert_failures_are_counted(live: Running) -> None:
    result = audit(live.run)
    assert result.problems == []
    assert result.failed.keys() == {"reward_exception", "reward_died", "reward_timeout"}
    last = trained_steps(live.run)[-1]
    for reason, groups in result.failed.items():
        # A prompt group has four samples.
        assert last[f"queue/dropped_{reason}"] == 4 * groups >= 4


def assert_first_failures_are_shown(live: Running, reward_file: Path) -> None:
    """The output and the status show the first failure of each reason."""
    failures = {failure.reason: failure for failure in read_failures(live.run.root)}
    assert failures.keys() == {"reward_exception", "reward_died", "reward_timeout"}
    assert failures["reward_timeout"].location == f"{reward_file}:11 in faulty"
    output = live.output.read_text()
    for failure in failures.values():
        assert output.count(f"rollout: first {failure.headline}") == 1
        assert f"first failure: {failure.headline}" in "\n".join(status_lines(status(live.run)))


# -- faults that end the run -----------------------------------------------------------------------


def test_a_reward_that_always_raises_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requires("mpi", "torch", "megatron", "transformers")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    reward_file = tmp_path / "faulty_rewards.py"
    location = f"{reward_file}:15 in never"
    result = run_to_end(
        tmp_path,
        merged(LIGHT, make_data(tmp_path) | {"rollout": {"reward": "faulty_rewards:never"}}),
        EXIT_NO_PROGRESS,
        "rollout: ",
        "reward_exception",
        "ZeroDivisionError",
        "max_failed_share=50%",
        location,
    )
    assert "incarnation 2" not in result.stdout
    output = re.sub(r"^\[ *[\d.]+s\] ", "", result.stdout, flags=re.MULTILINE)
    headline = "rollout: first reward_exception: ZeroDivisionError: division by zero (prompt p"
    assert output.count(headline) == 1 and location in output
    before, _, after = output.partition(headline)
    frame = f'  File "{reward_file}", line 15, in never\n'
    # The traceback comes with the first failure, before the run ends.
    assert frame in after.partition("of the last 64 prompt groups failed")[0]
    assert "Traceback" not in before and after.count("Traceback") == 1


def test_an_unknown_engine_flag_ends_the_run(tmp_path: Path) -> None:
    requires("sglang", "mpi", "torch", "megatron")
    # With another Python, only its SGLang knows its flags, so the role finds the mistake.
    site = {"python": sys.executable}
    settings = merged(LIGHT, {"rollout": {"engine": BAD_FLAG}, "site": site})
    del settings["rollout"]["engine"]["simulated"]
    result = run_to_end(
        tmp_path,
        settings,
        EXIT_CONFIG,
        "rollout.engine.flags.max_total_token",
        "the nearest is max_total_tokens",
    )
    assert "incarnation 2" not in result.stdout
