"""Runs that belong to somebody else: each command says so in one line, and never by a traceback."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.program import main
from relax_hpc.config import dump, load
from tests.guardian import remove_folder
from tests.plain_user import PlainUser, plain_user

pytestmark = pytest.mark.root

QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
PROGRAM = """
import contextlib, io, json, sys
from relax_hpc.commands.program import main

for argv in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(argv)
        except BaseException as error:
            code = repr(error)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
RUN = "RUN"
COMMANDS = [
    ["status", RUN],
    ["report", RUN],
    ["logs", RUN],
    ["queue", "audit", RUN],
    ["queue", "export", RUN, "--output", "rows.jsonl"],
    ["stop", RUN],
    ["stop", RUN, "--now"],
    ["samples", RUN],
    ["plot", RUN],
    ["resubmit", RUN, "--group", "rollout"],
    ["scale", RUN, "--replicas", "2"],
    ["scale", RUN, "--without", "1"],
    ["run", "--resume", "--run_dir", RUN],
    ["resume", RUN],
    ["submit", "--resume", "--run_dir", RUN],
    ["run", "--config", str(QUICKSTART), "--run_dir", RUN],
    ["submit", "--config", str(QUICKSTART), "--run_dir", RUN, "--layout", "jobs"],
    ["check", "--config", f"{RUN}/config.yaml"],
    ["convert", f"{RUN}/checkpoints/i000001-step-000001", "policy"],
]


@pytest.fixture(scope="module")
def user() -> Iterator[PlainUser]:
    with plain_user() as somebody:
        yield somebody


@pytest.fixture
def shared() -> Iterator[Path]:
    """Folder that everybody may look into."""
    folder = Path(tempfile.mkdtemp(prefix="relax-shared-"))
    folder.chmod(0o755)
    yield folder
    remove_folder(folder)


def make_run(path: Path) -> Path:
    """A run directory as `submit` makes it."""
    run = RunDir(path)
    run.create()
    dump(load([QUICKSTART], {"run_dir": str(run.root)}), run.config)
    return run.root


def of_run(root: Path, argv: list[str]) -> list[str]:
    """A command of COMMANDS about the run in ``root``."""
    return [argument.replace(RUN, str(root)) for argument in argv]


def open_to_readers(root: Path) -> None:
    """Let everybody read a run, and only its owner write to it."""
    for path in [root, *root.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)


def call(user: PlainUser, commands: list[list[str]]) -> list[tuple[int, str, str]]:
    """Exit code, standard output and standard error of each command, as the user."""
    done = user.run(user.python, "-c", PROGRAM, input=json.dumps(commands))
    assert done.returncode == 0, done.stderr
    return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


def test_commands_name_a_run_that_may_not_be_read(user: PlainUser, shared: Path) -> None:
    closed, inside = make_run(shared / "closed"), shared / "locked" / "run"
    config_closed = make_run(shared / "half")
    make_run(inside)
    closed.chmod(0)
    inside.parent.chmod(0)
    config_closed.chmod(0o755)
    (config_closed / "config.yaml").chmod(0)
    argvs = [of_run(closed, argv) for argv in [*COMMANDS, ["list", RUN]]]
    argvs += [of_run(inside, argv) for argv in COMMANDS if argv[0] in ("status", "run")]
    argvs += [of_run(config_closed, argv) for argv in COMMANDS if argv[0] in ("status", "samples")]
    for argv, (code, out, err) in zip(argvs, call(user, argvs), strict=True):
        text = out + err
        assert (code, text.count("\n")) == (EXIT_CONFIG, 1), (argv, code, text)
        # A new run names the setting that is wrong; all others name the file.
        refused = (": not yours to read (permission denied); ", ", but you cannot write in ")
        assert any(text_part in text for text_part in refused), (argv, text)
        assert argv[0] == "check" or err.startswith("relax-hpc: error: "), (argv, text)


def test_a_run_that_may_not_be_read_is_a_row_among_others(user: PlainUser, shared: Path) -> None:
    make_run(shared / "closed").chmod(0)
    open_to_readers(make_run(shared / "open"))
    (shared / "circle").symlink_to(shared / "circle")
    ((code, out, _),) = call(user, [["list", str(shared), "--json"]])
    rows: dict[str, dict[str, Any]] = {row["run"]: row for row in json.loads(out)}
    assert {name: row["state"] for name, row in rows.items()} == {
        "closed": "unreadable",
        "open": "ended",
    }
    assert code == EXIT_CONFIG and "not yours to read" in rows["closed"]["error"]


def test_a_run_that_may_only_be_read_is_not_changed(user: PlainUser, shared: Path) -> None:
    root = make_run(shared / "open")
    open_to_readers(root)
    argvs = [of_run(root, argv) for argv in COMMANDS if argv[0] in ("stop", "resubmit", "scale")]
    for argv, (code, out, err) in zip(argvs, call(user, argvs), strict=True):
        assert (code, out, err.count("\n")) == (EXIT_CONFIG, "", 1), (argv, code, out, err)
        assert f"{root}: not yours to write (permission denied); " in err, (argv, err)


def test_a_name_that_is_too_long_is_an_error_of_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["status", "long" * 100]) == EXIT_CONFIG
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "the name is too long for its file system" in err
