"""Errors of the command line: one line each, all together, and none that follows from another."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.commands.program import main

QUICKSTART = str(Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml")

WRONG = [
    (
        ["runn"],
        [
            "runn: unknown command",
            "run, sft, dpo, resume, submit, check,",
            "did you mean run?",
        ],
    ),
    (["--resume"], ["--resume: unknown option"]),
    (["run", "--steps", "ten"], ["steps: found 'ten' (str)", "an integer at least 1"]),
    (["run", "--steps", "0"], ["steps: found 0 (int)", "at least 1"]),
    (["run", "--steps", ""], ["steps: found ''"]),
    (["run", "--stepz", "1"], ["--stepz: unknown option", "did you mean steps?"]),
    (["run", "--stepz=1"], ["--stepz=1: unknown option", "did you mean steps?"]),
    (["run", "--step", "1"], ["--step: unknown option", "did you mean steps?"]),
    (
        ["run", "--temperature", "1"],
        [
            "--temperature: unknown option",
            "did you mean rollout.temperature or reward.judge.temperature",
        ],
    ),
    (["run", "--rollout", "{top_p: 1}"], ["--rollout: a section", "--rollout.replicas"]),
    (["run", "--rollout.temperature"], ["--rollout.temperature: expected one argument"]),
    (["run", "--rollout.temperature", ".nan"], ["rollout.temperature: found nan", "finite"]),
    (["run", "--data.shuffle", "maybe"], ["data.shuffle: found 'maybe'", "true or false"]),
    (["run", "--algorithm.name", "grop"], ["algorithm.name: found 'grop'", "did you mean 'grpo'?"]),
    (
        ["run", "--algorithm.advantage", "grpo"],
        ["algorithm.advantage: there is no such", "it is algorithm.name now"],
    ),
    (["run", "--algorithm.mine", "1"], ["algorithm.mine: unknown key, allowed: name, passes,"]),
    (
        ["run", "--algorithm.correction", "off"],
        ["--algorithm.correction: a section", "--algorithm.correction.kind"],
    ),
    (
        ["run", "--rollout.engine.flags", "5"],
        ["rollout.engine.flags: found '5'", "--rollout.engine.flags.NAME VALUE"],
    ),
    (
        ["run", "--groups", "5"],
        ["groups: found '5'", "--groups.NAME VALUE or --groups '{NAME: VALUE}'"],
    ),
    (
        ["run", "--groups.actor.role", "[actor]"],
        ["groups.actor.role: unknown key", "did you mean roles?"],
    ),
    (["run", "--groups.hub.roles", "[a"], ["--groups.hub.roles:1: not valid YAML"]),
    (["run", "--groups.hub"], ["--groups.hub: expected one argument"]),
    (["run", "--groups.x", "5"], ["groups.x: found 5 (int)", "a mapping of roles, env"]),
    (
        ["run", "--groups.refernce", "null"],
        ["groups.refernce: null removes", "did you mean reference?"],
    ),
    (
        ["run", "--groups.hub.roles=[]", "--groups.hub=null"],
        ["groups.hub.roles: hub has a value, too"],
    ),
    (["status", "a", "--groups.x", "1"], ["--groups.x: unknown option"]),
    (["run", "extra"], ["extra: unknown option"]),
    (["run", "--resume"], ["--resume: found neither --run_dir nor --config"]),
    (["plot"], ["required: runs"]),
    (["resume"], ["required: run"]),
    (["status", "a", "b"], ["b: unknown option"]),
    (["status", "a", "--watch", "often"], ["watch: found 'often'"]),
    (["resubmit"], ["required: run"]),
    (["resubmit", "a"], ["--group: found nothing"]),
    (["resubmit", "a", "--group", "b", "--stepz", "1"], ["--stepz: unknown option"]),
    (["scale", "a", "--replicas", "few"], ["replicas: found 'few'"]),
]


@pytest.mark.parametrize(("argv", "texts"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_a_wrong_command_line_is_one_line_of_error(
    argv: list[str], texts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # The other options of the run are valid.
    valid_options = ["--config", QUICKSTART] if argv[0] == "run" and "--resume" not in argv else []
    assert main([argv[0], *valid_options, *argv[1:]]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("relax-hpc: error: command line: ")
    for text in texts:
        assert text in captured.err


def test_an_error_in_a_file_names_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rollout: {temprature: 1}")
    assert main(["run", "--config", QUICKSTART, "--config", str(path)]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith(
        f"relax-hpc: error: {path}:1: rollout.temprature: unknown key"
    )


def test_an_unreadable_file_hides_errors_that_follow_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(tmp_path / "run.yaml"), "--seed", "-1"]) == EXIT_CONFIG
    missing, wrong = capsys.readouterr().out.splitlines()
    assert "run.yaml: cannot be read" in missing and wrong.startswith(
        "command line: seed: found -1"
    )


@pytest.mark.parametrize(
    "command",
    [
        "status RUN",
        "report RUN",
        "stop RUN",
        "logs RUN",
        "samples RUN",
        "list RUN",
        "plot RUN",
        "queue audit RUN",
        "resume RUN",
        "resubmit RUN --group actor",
        "scale RUN --replicas 2",
    ],
)
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG])
def test_an_unusable_path_is_one_line_of_error(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    number: int,
) -> None:
    stat = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if not isinstance(path, int) and os.fsdecode(path).startswith("/closed/"):
            raise OSError(number, os.strerror(number), os.fsdecode(path))
        return stat(path, **options)

    # Root can enter all folders, so the error must be simulated.
    monkeypatch.setattr(os, "stat", refuse)
    assert main(command.replace("RUN", "/closed/run").split()) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("relax-hpc: error: /closed/") and error.count("\n") == 1


def test_errors_of_all_kinds_are_reported_together(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "steps: 0\nstepz: 4\nrollout: {temperature: 0}\ndata: {train: /nowhere.jsonl}\n"
    )
    options = ["--config", str(file), "--run_dir", str(tmp_path / "run")]
    options += ["--eval.every", "ten", "--max_stalness", "4", "--seed=-1"]
    for command in ("check", "run", "doctor"):
        assert main([command, *options]) == EXIT_CONFIG
        lines = capsys.readouterr().err.splitlines()
        expected_texts = [
            "command line: eval.every: found 'ten'",
            "command line: --max_stalness: unknown option; did you mean max_staleness?",
            f"{file}:1: steps: found 0",
            f"{file}:2: stepz: unknown key",
            "command line: seed: found -1",
            f"{file}:4: data.train: found '/nowhere.jsonl', which is not a file",
            f"{file}:3: rollout.temperature: found 0.0",
        ]
        for expected_text in expected_texts:
            assert sum(f"error: {expected_text}" in line for line in lines) == 1, expected_text
    assert not (tmp_path / "run").exists()
    no_errors = tmp_path / "fine.yaml"
    no_errors.write_text("layout: local\nrollout: {groups_per_request: 64}\n")
    main(
        [
            "doctor",
            "--config",
            QUICKSTART,
            "--config",
            str(no_errors),
            "--run_dir",
            str(tmp_path / "run"),
        ]
    )
    lines = capsys.readouterr().out
    assert (
        f"warning  {no_errors}:2: rollout.groups_per_request: found 64" in lines
        and "ok       layout: no mistakes" in lines
    )
    assert main(["check", "--config", str(file), "--steps", "1"]) == EXIT_CONFIG
    assert f"{file}:3: rollout.temperature: found 0.0" in capsys.readouterr().out


def test_an_error_hides_errors_that_follow_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check would use the default of the wrong setting."""
    assert (
        main(["check", "--config", QUICKSTART, "--queue.max_rows", "5", "--prompts_per_step", "0"])
        == EXIT_CONFIG
    )
    assert capsys.readouterr().out.splitlines() == [
        "command line: prompts_per_step: found 0 (int), allowed: at least 1"
    ]


@pytest.mark.parametrize("command", ["check", "doctor", "run", "submit"])
def test_an_unreadable_file_is_the_only_reported_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """Without the file the model and the data would be reported as missing."""
    path = tmp_path / "run.yaml"
    assert main([command, "--config", str(path), "--run_dir", str(tmp_path / "run")]) == EXIT_CONFIG
    lines = "".join(capsys.readouterr()).splitlines()
    assert len(lines) == 1 and f"{path}: cannot be read: No such file" in lines[0]


def test_the_doctor_reports_no_errors_that_follow_from_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--config", QUICKSTART, "--run_dir", str(tmp_path / "run"), "--queue.max_rows", "5"]
    assert main(["doctor", *options, "--prompts_per_step", "0"]) == EXIT_CONFIG
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("ok ")] == [
        "error    command line: prompts_per_step: found 0 (int), allowed: at least 1"
    ]


def test_a_failed_dry_run_creates_no_folder(tmp_path: Path) -> None:
    argv = [
        "submit",
        "--dry-run",
        "--config",
        QUICKSTART,
        "--run_dir",
        str(tmp_path / "run"),
        "--layout",
        "jobs",
    ]
    assert (
        main([*argv, "--site.options.nodes", "2"]) == EXIT_CONFIG
        and not (tmp_path / "run").exists()
    )
