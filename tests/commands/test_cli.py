"""The command line: one line an error, exit codes, and a frozen list of options."""

from __future__ import annotations

import ast
import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relax_hpc import __version__
from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_NO_PROGRESS, NoProgressError
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.program import COMMANDS, commands, main, parser_of
from relax_hpc.config import Config, dump, load
from relax_hpc.config.changes import add_change
from relax_hpc.config.options import options

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "runs" / "quickstart.yaml")
SCHEMA = ROOT / "relax_hpc" / "config" / "schema"
FROZEN = Path(__file__).with_name("frozen_cli.txt")
REGENERATE = "python -m tests.commands.test_cli > tests/commands/frozen_cli.txt"

WRONG = [
    (
        ["runn"],
        [
            "runn: unknown command",
            "run, sft, dpo, resume, submit, check, doctor, plan, status, report, logs, resubmit, "
            "scale, stop, list,",
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


@pytest.mark.parametrize(("argv", "parts"), WRONG, ids=[" ".join(argv) for argv, _ in WRONG])
def test_wrong_command_lines(
    argv: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    # Of a run that is otherwise in order.
    base = ["--config", QUICKSTART] if argv[0] == "run" and "--resume" not in argv else []
    assert main([argv[0], *base, *argv[1:]]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith("relax-hpc: error: command line: ")
    for part in parts:
        assert part in captured.err


def test_wrong_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.yaml"
    path.write_text("rollout: {temprature: 1}")
    assert main(["run", "--config", QUICKSTART, "--config", str(path)]) == EXIT_CONFIG
    assert capsys.readouterr().err.startswith(
        f"relax-hpc: error: {path}:1: rollout.temprature: unknown key"
    )


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, bool]]:
    """What `run` would have started."""
    calls: list[tuple[Config, bool]] = []
    replace(
        monkeypatch,
        "relax_hpc.commands.local",
        run=lambda config, resume: calls.append((config, resume)) or 0,
    )
    return calls


def test_run_takes_overrides(tmp_path: Path, started: list[tuple[Config, bool]]) -> None:
    argv = [
        "run",
        "--config",
        QUICKSTART,
        "--run_dir",
        str(tmp_path / "run"),
        "--rollout.temperature",
        "0.7",
    ]
    argv += [
        "--actor.optimizer.lr=1e-4",
        "--steps",
        "10",
        "--name",
        "2024",
        "--data.shuffle",
        "false",
    ]
    argv += [
        "--rollout.engine.flags.max_total_tokens",
        "8192",
        "--rollout.engine.flags.schedule_policy",
        "fcfs",
    ]
    argv += ["--groups.reference", "null", "--groups.hub.roles", "[advantages, actor_fwd]"]
    argv += ["--groups.actor_fwd=null", "--groups.actor.env.A", "b", "--groups.actor.env.B=1"]
    assert main(argv) == 0
    [(config, resume)] = started
    assert not resume
    assert (config.rollout.temperature, config.actor.optimizer.lr, config.steps, config.name) == (
        0.7,
        1e-4,
        10,
        "2024",
    )
    assert not config.data.shuffle and config.rollout.max_new_tokens == 6
    assert config.groups["actor"].env == {"A": "b", "B": "1"}
    flags = config.rollout.engine.flags
    assert (flags["max_total_tokens"], flags["schedule_policy"], flags["log_level"]) == (
        8192,
        "fcfs",
        "error",
    )
    assert {name: group.roles for name, group in config.groups.items()} == {
        "hub": ["advantages", "actor_fwd"],
        "rollout": ["rollout"],
        "actor": ["actor"],
    }


def test_resume(
    tmp_path: Path,
    started: list[tuple[Config, bool]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    run = tmp_path / "runs" / "quickstart"
    fresh = ["run", "--config", QUICKSTART]
    assert main([*fresh, "--resume"]) == EXIT_CONFIG
    assert "found no run in" in capsys.readouterr().err
    run.mkdir(parents=True)
    dump(
        load([QUICKSTART], {"run_dir": "/elsewhere", "groups.reference": None}), run / "config.yaml"
    )
    assert main(fresh) == EXIT_CONFIG
    assert "already holds a run, --resume it or name another --run_dir" in capsys.readouterr().err
    assert main([*fresh, "--resume"]) == 0
    assert main(["run", "--resume", "--run_dir", "runs/quickstart", "--steps", "400"]) == 0
    assert main(["run", "--resume", "--name", "quickstart"]) == 0
    assert [resume for _, resume in started] == [True] * 3
    assert [config.steps for config, _ in started] == [300, 400, 300]
    assert all(config.run_dir == str(run) for config, _ in started)
    assert "reference" not in started[1][0].groups


def test_run_lists_every_finding_and_starts_nothing(
    tmp_path: Path, started: list[tuple[Config, bool]], capsys: pytest.CaptureFixture[str]
) -> None:
    argv = [
        "--config",
        QUICKSTART,
        "--run_dir",
        str(tmp_path / "r"),
        "--groups.rollout=null",
        "--rollout.reward=x",
    ]
    assert main(["run", *argv]) == EXIT_CONFIG
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[2:4][-1 if "command line" in line else 0] for line in lines] == [
        "groups",
        "rollout.reward",
    ]
    assert main(["check", *argv]) == EXIT_CONFIG
    assert capsys.readouterr().out.splitlines() == [
        line.removeprefix("relax-hpc: error: ") for line in lines
    ]
    assert not started and not (tmp_path / "r").exists()


def test_of_a_file_that_cannot_be_read_no_consequences_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", str(tmp_path / "run.yaml"), "--seed", "-1"]) == EXIT_CONFIG
    missing, wrong = capsys.readouterr().out.splitlines()
    assert "run.yaml: cannot be read" in missing and wrong.startswith(
        "command line: seed: found -1"
    )


def test_a_dry_run_that_cannot_be_rendered_leaves_nothing(tmp_path: Path) -> None:
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


def test_check_of_the_quickstart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--config", QUICKSTART, "--run_dir", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().out == "no findings\n"


def test_print_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--config", QUICKSTART, "--print_config", "--steps", "5"]) == 0
    text = capsys.readouterr().out
    assert "steps: 5  # command line\n" in text and f"name: quickstart  # {QUICKSTART}\n" in text
    (tmp_path / "printed.yaml").write_text(text)
    assert load([tmp_path / "printed.yaml"]) == load([QUICKSTART], {"steps": 5})


def test_commands_pass_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def take(*args: Any, **named: Any) -> int:
        seen.append((*args, *sorted(named.items())))
        return 3

    for name in (
        "base.metrics.plot",
        "ops.observe.status_view",
        "ops.observe.listing",
        "commands.stop",
        "commands.scale",
    ):
        replace(monkeypatch, f"relax_hpc.{name}", main=take)
    replace(monkeypatch, "relax_hpc.ops.doctor.doctor", main=take)
    monkeypatch.setattr("relax_hpc.cluster.sandbox.command.main", take)
    calls: list[tuple[list[str], tuple[Any, ...]]] = [
        (
            ["plot", "a", "b", "--tags", "x", "y", "--output", "o.png"],
            (["a", "b"], "o.png", ["x", "y"]),
        ),
        (["plot", "a"], (["a"], "rewards.png", [])),
        (["status", "a", "--json"], ("a", True, None)),
        (["status", "a", "--watch"], ("a", False, 5.0)),
        (["status", "a", "--watch", "10"], ("a", False, 10.0)),
        (["stop", "a", "--now"], ("a", True)),
        (["list"], ("runs", False)),
        (["list", "x", "--json"], ("x", True)),
        (["scale", "a", "--replicas", "3"], ("a", "rollout", 3, [], False)),
        (
            ["scale", "a", "--replicas", "3", "--group", "g", "--time-min", "5", "--parsable"],
            ("a", "g", 3, ["--time-min=5"], True),
        ),
        (["sandbox", "up", "d", "--nodes", "4"], ("up", ["d"], ("nodes", 4))),
        (["sandbox", "kill-node", "node1", "--down"], ("kill-node", ["node1"], ("down", True))),
    ]
    for argv, _ in calls:
        assert main(argv) == 3
    assert seen == [expected for _, expected in calls]
    assert main(["doctor", "--config", QUICKSTART, "--deep"]) == 3
    config, deep, as_json, _ = seen[-1]
    assert (config.name, deep, as_json) == ("quickstart", True, False)


def test_resubmit_passes_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_hpc.commands import resubmit

    seen: list[Any] = []
    monkeypatch.setattr(resubmit, "main", lambda *args: seen.append(args) or 0)
    argv = [
        "resubmit",
        "a",
        "--group",
        "rollout",
        "--nodes",
        "4",
        "--parsable",
        "--config",
        "c.yaml",
    ]
    assert main([*argv, "--rollout.temperature", "0.5", "--groups.rollout.env.A", "1"]) == 0
    overrides = {"rollout": {"temperature": 0.5}, "groups.rollout.env.A": "1"}
    assert seen == [
        ("a", resubmit.ResubmitRequest("rollout", ["c.yaml"], overrides, nodes=4, parsable=True))
    ]


def test_a_resume_takes_over_what_was_changed_for_whole_groups(
    tmp_path: Path, started: list[tuple[Config, bool]]
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    dump(load([QUICKSTART], {"run_dir": str(run.root)}), run.config)
    for group, value in (("rollout", 0.5), ("rollout-2", 0.7)):
        add_change(run, load([run.config]), group, [], {"rollout.temperature": value})
    assert main(["run", "--resume", "--run_dir", str(run.root)]) == 0
    assert started[0][0].rollout.temperature == 0.5


def test_a_run_is_resumed_as_it_was_started(
    tmp_path: Path,
    started: list[tuple[Config, bool]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from relax_hpc.cluster.slurm import job_lookup
    from relax_hpc.commands import submit as submit_module

    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        submit_module, "submit", lambda config, *about: seen.append((config, *about)) or 0
    )
    monkeypatch.setattr(job_lookup, "check_no_live_jobs", lambda *_: None)
    here, there = RunDir(tmp_path / "here"), RunDir(tmp_path / "there")
    cluster = str(Path(QUICKSTART).parents[1] / "clusters" / "sandbox.yaml")
    for run, files in ((here, [QUICKSTART]), (there, [QUICKSTART, cluster])):
        run.create()
        dump(load(files, {"run_dir": str(run.root)}), run.config)
    assert main(["resume", str(here.root), "--steps", "400"]) == 0
    assert [(config.steps, resume) for config, resume in started] == [(400, True)] and not seen
    assert main(["resume", str(there.root)]) == 0
    [(config, resume, dry_run, form)] = seen
    assert (config.run_dir, resume, dry_run, form) == (str(there.root), True, False, "") and len(
        started
    ) == 1
    assert main(["resume", str(tmp_path / "nowhere")]) == EXIT_CONFIG
    assert "found no run in" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [(NoProgressError("in\ncircles"), EXIT_NO_PROGRESS), (KeyboardInterrupt(), 130)],
)
def test_exit_codes(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    code: int,
) -> None:
    def fail(*_: Any) -> int:
        raise error

    replace(monkeypatch, "relax_hpc.ops.observe.status_view", main=fail)
    assert main(["status", "a"]) == code
    assert capsys.readouterr().err in ("relax-hpc: error: in circles\n", "")


@pytest.mark.parametrize(
    "words",
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
def test_a_path_that_cannot_be_used_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: str,
    number: int,
) -> None:
    stat = os.stat

    def refuse(path: Any, **settings: Any) -> os.stat_result:
        if not isinstance(path, int) and os.fsdecode(path).startswith("/closed/"):
            raise OSError(number, os.strerror(number), os.fsdecode(path))
        return stat(path, **settings)

    # Root may enter any folder.
    monkeypatch.setattr(os, "stat", refuse)
    assert main(words.replace("RUN", "/closed/run").split()) == EXIT_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("relax-hpc: error: /closed/") and error.count("\n") == 1


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0 and capsys.readouterr().out == f"relax-hpc {__version__}\n"
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(
        f"{name} " in text and command.help.split()[0] in text for name, command in COMMANDS.items()
    )


@pytest.mark.parametrize("name", sorted(commands()))
def test_help_of_a_verb_is_its_own_lines(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main([*name.split(), "--help"]) == EXIT_DONE
    except SystemExit as done:
        assert done.code in (None, EXIT_DONE)
    text = capsys.readouterr().out
    assert text.startswith(f"usage: relax-hpc {name} ") and len(text.splitlines()) < 50
    assert "--rollout.replicas " not in text.partition("Every setting")[0]
    others = {other.split()[1] for other in commands() if " " in other and other != name}
    assert not any(f"({other})" in text for other in others), "what belongs to another verb"


def test_help_of_sections(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--help", "rollout"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert (
        "--rollout.engine.port" in text
        and "--actor" not in text
        and "Go on with the run" not in text
    )
    assert main(["submit", "--help", "all"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert all(f"--{option.key} " in text for option in options())
    assert main(["run", "--help", "roll"]) == EXIT_CONFIG
    assert "--help: found 'roll', allowed: all, run, model, " in capsys.readouterr().err
    assert main(["run", "--help", "model.tiny"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "--model.tiny.num_layers" in text and "--model.path" not in text
    assert "that is created offline with its tokenizer" in " ".join(text.split())
    assert main(["run", "--help", "model.path"]) == EXIT_DONE
    text = capsys.readouterr().out
    assert "--model.path" in text and "--model.tiny.num_layers" not in text
    assert main(["run", "--help", "model.tyni"]) == EXIT_CONFIG
    assert "did you mean model.tiny?" in capsys.readouterr().err
    for word in ("queue", "sandbox"):
        assert main([word]) == main([word, "--help"]) == EXIT_DONE
        assert f"usage: relax-hpc {word} COMMAND" in capsys.readouterr().out
    assert main(["queue", "audti"]) == EXIT_CONFIG
    assert (
        "queue audti: unknown verb, allowed: audit, export; did you mean audit?"
        in capsys.readouterr().err
    )


def test_help_of_run_documents_the_fields() -> None:
    text = " ".join(parser_of("run").format_help().split())
    assert "--checkpoint.max_failures MAX_FAILURES Number of consecutive checkpoints" in text
    assert "[at least 1] (type: int, default: 4)" in text
    assert "%" not in text
    keys = {option.key for option in options()}
    assert all(f"--{key} " in text for key in keys)


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["check", "--config", QUICKSTART]])
def test_the_command_line_loads_nothing_heavy(argv: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; from relax_hpc.commands.program import main\n"
        "try: main(sys.argv[1:])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'msgpack', 'matplotlib', 'transformers', 'h5py') if "
        "name in sys.modules])"
    )
    command = [sys.executable, "-c", code, *argv]
    output = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert output.splitlines()[-1] == "[]"


def test_module_is_the_command() -> None:
    command = [sys.executable, "-m", "relax_hpc", "run", "--config", QUICKSTART, "--steps", "0"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == EXIT_CONFIG
    assert (
        result.stderr
        == "relax-hpc: error: command line: steps: found 0 (int), allowed: at least 1\n"
    )


def test_mistakes_of_all_kinds_are_told_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(
        "steps: 0\nstepz: 4\nrollout: {temperature: 0}\ndata: {train: /nowhere.jsonl}\n"
    )
    words = ["--config", str(file), "--run_dir", str(tmp_path / "run")]
    words += ["--eval.every", "ten", "--max_stalness", "4", "--seed=-1"]
    for command in ("check", "run", "doctor"):
        assert main([command, *words]) == EXIT_CONFIG
        said = capsys.readouterr().err.splitlines()
        parts = [
            "command line: eval.every: found 'ten'",
            "command line: --max_stalness: unknown option; did you mean max_staleness?",
            f"{file}:1: steps: found 0",
            f"{file}:2: stepz: unknown key",
            "command line: seed: found -1",
            f"{file}:4: data.train: found '/nowhere.jsonl', which is not a file",
            f"{file}:3: rollout.temperature: found 0.0",
        ]
        for part in parts:
            assert sum(f"error: {part}" in line for line in said) == 1, part
    assert not (tmp_path / "run").exists()
    fine = tmp_path / "fine.yaml"
    fine.write_text("layout: local\nrollout: {groups_per_request: 64}\n")
    main(
        [
            "doctor",
            "--config",
            QUICKSTART,
            "--config",
            str(fine),
            "--run_dir",
            str(tmp_path / "run"),
        ]
    )
    said = capsys.readouterr().out
    assert (
        f"warning  {fine}:2: rollout.groups_per_request: found 64" in said
        and "ok       layout: no mistakes" in said
    )
    assert main(["check", "--config", str(file), "--steps", "1"]) == EXIT_CONFIG
    assert f"{file}:3: rollout.temperature: found 0.0" in capsys.readouterr().out


def test_a_mistake_hides_what_would_follow_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its default would be judged in its place."""
    assert (
        main(["check", "--config", QUICKSTART, "--queue.max_rows", "5", "--prompts_per_step", "0"])
        == EXIT_CONFIG
    )
    assert capsys.readouterr().out.splitlines() == [
        "command line: prompts_per_step: found 0 (int), allowed: at least 1"
    ]


@pytest.mark.parametrize("command", ["check", "doctor", "run", "submit"])
def test_a_file_that_cannot_be_read_is_the_one_mistake_that_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    """The run whose model and data it names would be found to have neither."""
    path = tmp_path / "run.yaml"
    assert main([command, "--config", str(path), "--run_dir", str(tmp_path / "run")]) == EXIT_CONFIG
    said = "".join(capsys.readouterr()).splitlines()
    assert len(said) == 1 and f"{path}: cannot be read: No such file" in said[0]


def test_the_doctor_says_nothing_that_follows_from_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", QUICKSTART, "--run_dir", str(tmp_path / "run"), "--queue.max_rows", "5"]
    assert main(["doctor", *words, "--prompts_per_step", "0"]) == EXIT_CONFIG
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if not line.startswith("ok ")] == [
        "error    command line: prompts_per_step: found 0 (int), allowed: at least 1"
    ]


def test_help_shows_whole_descriptions(capsys: pytest.CaptureFixture[str]) -> None:
    """Every paragraph of the docstrings in the schema, of sections and of settings."""
    assert main(["run", "--help", "all"]) == EXIT_DONE
    printed = "".join(capsys.readouterr().out.split())
    texts = [text for path in SCHEMA.glob("*.py") for text in schema_docstrings(path)]
    assert any("\n\n" in text for text in texts), (
        "no description has several paragraphs: the test proves nothing"
    )
    assert not [text for text in texts if "".join(text.split()).rstrip(".") not in printed]


def schema_docstrings(path: Path) -> Iterator[str]:
    """Docstrings of the sections in a file of the schema, and of their settings."""
    for node in ast.parse(path.read_text()).body:
        # Groups are named by the user, so their settings are no fixed options.
        if not isinstance(node, ast.ClassDef) or node.name in (
            "Config",
            "GroupConfig",
            "ResourcesConfig",
        ):
            continue
        for child, following in zip(node.body, [*node.body[1:], None], strict=True):
            is_text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
            if is_text and not isinstance(following, ast.FunctionDef):
                yield child.value.value


def test_options_are_frozen() -> None:
    assert frozen() == FROZEN.read_text(), (
        f"the options changed; if that is wanted, tell users and run: {REGENERATE}"
    )


def frozen() -> str:
    """All options of all commands: name, type and default, one a line."""
    lines = []
    for name in commands():
        if name in ("check", "doctor", "plan", "submit", "resubmit"):
            known = {
                action.dest for action in parser_of("run")._actions
            }  # the rest are those of run
        else:
            known = set()
        for action in parser_of(name)._actions:
            if action.dest in known:
                continue
            hint = getattr(action, "_typehint", action.type)
            shown = (
                ""
                if hint is None
                else getattr(hint, "__name__", "")
                if isinstance(hint, type)
                else str(hint)
            )
            lines.append(
                f"{name} {' '.join(action.option_strings) or action.dest} {shown or '-'} "
                f"{action.default!r}"
            )
    return "\n".join(lines).replace("typing.", "") + "\n"


def replace(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Put a module of `functions` in the place of the module `name`."""
    module = ModuleType(name)
    vars(module).update(functions)
    parent, _, last = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        sys.modules.get(parent) or __import__(parent, fromlist=[last]), last, module, raising=False
    )


if __name__ == "__main__":
    print(frozen(), end="")
