"""The command line: arguments of commands, exit codes, and the frozen list of options."""

from __future__ import annotations

import subprocess
import sys
from argparse import Action
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_NO_PROGRESS, NoProgressError
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.program import commands, main, parser_of
from relax_hpc.config import Config, dump, load
from relax_hpc.config.changes import add_change

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "runs" / "quickstart.yaml")
FROZEN = Path(__file__).with_name("frozen_cli.txt")
REGENERATE = "python -m tests.commands.test_cli > tests/commands/frozen_cli.txt"


@pytest.fixture
def started_runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Config, bool]]:
    """Configurations that `run` would start, and whether it would resume them."""
    calls: list[tuple[Config, bool]] = []
    replace_module(
        monkeypatch,
        "relax_hpc.commands.local",
        run=lambda config, resume: calls.append((config, resume)) or 0,
    )
    return calls


def test_run_takes_overrides(tmp_path: Path, started_runs: list[tuple[Config, bool]]) -> None:
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
    [(config, resume)] = started_runs
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
        "hub": ["advantages", "actor_fwd", "api"],
        "rollout": ["rollout"],
        "actor": ["actor"],
    }


def test_resume(
    tmp_path: Path,
    started_runs: list[tuple[Config, bool]],
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
    assert [resume for _, resume in started_runs] == [True] * 3
    assert [config.steps for config, _ in started_runs] == [300, 400, 300]
    assert all(config.run_dir == str(run) for config, _ in started_runs)
    assert "reference" not in started_runs[1][0].groups


def test_run_lists_every_finding_and_starts_nothing(
    tmp_path: Path, started_runs: list[tuple[Config, bool]], capsys: pytest.CaptureFixture[str]
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
    assert not started_runs and not (tmp_path / "r").exists()


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
    received: list[Any] = []

    def record_call(*args: Any, **keywords: Any) -> int:
        received.append((*args, *sorted(keywords.items())))
        return 3

    for name in (
        "base.metrics.plot",
        "ops.observe.status_screen",
        "ops.observe.listing",
        "commands.stop",
        "commands.scale",
    ):
        replace_module(monkeypatch, f"relax_hpc.{name}", main=record_call)
    replace_module(monkeypatch, "relax_hpc.ops.doctor.doctor", main=record_call)
    monkeypatch.setattr("relax_hpc.cluster.sandbox.command.main", record_call)
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
    assert received == [expected for _, expected in calls]
    assert main(["doctor", "--config", QUICKSTART, "--deep"]) == 3
    config, deep, as_json, _ = received[-1]
    assert (config.name, deep, as_json) == ("quickstart", True, False)


def test_resubmit_passes_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from relax_hpc.commands import resubmit

    received: list[Any] = []
    monkeypatch.setattr(resubmit, "main", lambda *args: received.append(args) or 0)
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
    assert received == [
        ("a", resubmit.ResubmitRequest("rollout", ["c.yaml"], overrides, nodes=4, parsable=True))
    ]


def test_a_resume_keeps_changes_of_groups(
    tmp_path: Path, started_runs: list[tuple[Config, bool]]
) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    dump(load([QUICKSTART], {"run_dir": str(run.root)}), run.config)
    for group, value in (("rollout", 0.5), ("rollout-2", 0.7)):
        add_change(run, load([run.config]), group, [], {"rollout.temperature": value})
    assert main(["run", "--resume", "--run_dir", str(run.root)]) == 0
    assert started_runs[0][0].rollout.temperature == 0.5


def test_a_run_is_resumed_in_its_layout(
    tmp_path: Path,
    started_runs: list[tuple[Config, bool]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from relax_hpc.cluster.slurm import job_lookup
    from relax_hpc.commands import submit as submit_module

    submissions: list[tuple[Any, ...]] = []
    monkeypatch.setattr(
        submit_module,
        "submit",
        lambda config, *options: submissions.append((config, *options)) or 0,
    )
    monkeypatch.setattr(job_lookup, "check_no_live_jobs", lambda *_: None)
    local_run, cluster_run = RunDir(tmp_path / "here"), RunDir(tmp_path / "there")
    cluster = str(Path(QUICKSTART).parents[1] / "clusters" / "sandbox.yaml")
    for run, files in ((local_run, [QUICKSTART]), (cluster_run, [QUICKSTART, cluster])):
        run.create()
        dump(load(files, {"run_dir": str(run.root)}), run.config)
    assert main(["resume", str(local_run.root), "--steps", "400"]) == 0
    assert [(config.steps, resume) for config, resume in started_runs] == [
        (400, True)
    ] and not submissions
    assert main(["resume", str(cluster_run.root)]) == 0
    [(config, resume, dry_run, form)] = submissions
    assert (config.run_dir, resume, dry_run, form) == (
        str(cluster_run.root),
        True,
        False,
        "",
    ) and len(started_runs) == 1
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

    replace_module(monkeypatch, "relax_hpc.ops.observe.status_screen", main=fail)
    assert main(["status", "a"]) == code
    assert capsys.readouterr().err in ("relax-hpc: error: in circles\n", "")


@pytest.mark.parametrize("argv", [["--help"], ["run", "--help"], ["check", "--config", QUICKSTART]])
def test_the_command_line_imports_no_large_library(argv: list[str], tmp_path: Path) -> None:
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


def test_the_package_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "relax_hpc", "run", "--config", QUICKSTART, "--steps", "0"]
    result = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == EXIT_CONFIG
    assert (
        result.stderr
        == "relax-hpc: error: command line: steps: found 0 (int), allowed: at least 1\n"
    )


def test_options_are_frozen() -> None:
    assert list_options() == FROZEN.read_text(), (
        f"the options changed; if this is intended, tell users and run: {REGENERATE}"
    )


def list_options() -> str:
    """All options of all commands: name, type and default, one option per line."""
    run_options = {action.dest for action in parser_of("run")._actions}
    lines = []
    for name in commands():
        # These commands have the options of `run`, which are listed once.
        has_run_options = name in ("check", "doctor", "plan", "submit", "resubmit")
        for action in parser_of(name)._actions:
            if has_run_options and action.dest in run_options:
                continue
            option = " ".join(action.option_strings) or action.dest
            lines.append(f"{name} {option} {type_name(action) or '-'} {action.default!r}")
    return "\n".join(lines).replace("typing.", "") + "\n"


def type_name(action: Action) -> str:
    """Type of an option as text; empty if the option has no type."""
    hint = getattr(action, "_typehint", action.type)
    if hint is None:
        return ""
    return getattr(hint, "__name__", "") if isinstance(hint, type) else str(hint)


def replace_module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Replace the module `name` by a module of `functions`."""
    module = ModuleType(name)
    vars(module).update(functions)
    parent, _, last = name.rpartition(".")
    monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(
        sys.modules.get(parent) or __import__(parent, fromlist=[last]), last, module, raising=False
    )


if __name__ == "__main__":
    print(list_options(), end="")
