"""Completion in a real interactive bash. It starts no Python."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relax_hpc.commands.program import commands, main
from tests.requirements import requires

requires("pexpect")
import pexpect  # noqa: E402

PROMPT = "READY>"
WAIT_S = 60.0


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The script that the command prints. Printing it imports no heavy library."""
    path = tmp_path_factory.mktemp("completion") / "relax-hpc"
    code = (
        "import sys; from relax_hpc.commands.program import main; main(['completion', 'bash']); "
        "heavy = {'torch', 'transformers', 'sglang', 'megatron', 'aiohttp'} & {*sys.modules}; "
        "sys.exit(str(heavy) if heavy else 0)"
    )
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code], capture_output=True, timeout=WAIT_S
    )
    assert result.returncode == 0, result.stderr.decode()
    path.write_bytes(result.stdout)
    return path


@pytest.fixture(scope="module")
def shell(script: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[pexpect.spawn]:
    """An interactive bash with the script, in a folder with a run and a file."""
    folder = tmp_path_factory.mktemp("folder")
    (folder / "my runs").mkdir()
    (folder / "own.yaml").write_text("")
    # Without a PATH the completion could not start any program.
    bash = pexpect.spawn(
        "/bin/bash",
        ["--norc", "--noprofile"],
        cwd=folder,
        env={"TERM": "dumb", "PATH": "", "PS1": PROMPT, "INPUTRC": "/dev/null"},
        encoding="utf-8",
        timeout=WAIT_S,
        dimensions=(50, 400),
    )
    bash.expect_exact(PROMPT)
    for line in (f"PS1={PROMPT}", "bind 'set bell-style none'", f"source '{script}'"):
        bash.sendline(line)
        bash.expect_exact(line)
        bash.expect_exact(PROMPT)
    yield bash
    bash.close(force=True)


def complete(shell: pexpect.spawn, line: str) -> str:
    """What the line becomes after a tab, with all candidates if there are several."""
    # The mark after the tab is typed into the completed line, so its echo ends the output.
    shell.send(f"{line}\t\t#END")
    shell.expect_exact("#END")
    text = shell.before
    shell.send("\x15\r")
    shell.expect_exact(PROMPT)
    return text


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("relax-hpc stat", "relax-hpc status "),
        ("relax-hpc queue ex", "relax-hpc queue export "),
        ("relax-hpc queue export RUN --form", "--format "),
        ("relax-hpc queue export RUN --step", "--step --steps"),
        ("relax-hpc run --rollout.temp", "--rollout.temperature "),
        ("relax-hpc run --rollou", "--rollout."),
        ("relax-hpc run --layout j", "--layout jobs "),
        ("relax-hpc run --layout=j", "--layout=jobs "),
        ("relax-hpc run --config quick", "--config quickstart "),
        ("relax-hpc run --config own", "--config own.yaml "),
        ("relax-hpc status my", "status my\\ runs/"),
        ("relax-hpc completion ", "completion bash "),
    ],
)
def test_tab(shell: pexpect.spawn, line: str, expected: str) -> None:
    text = complete(shell, line)
    assert " ".join(expected.split()) in " ".join(text.split())


def test_all_commands_are_offered(shell: pexpect.spawn) -> None:
    text = complete(shell, "relax-hpc ")
    assert {name.split()[0] for name in commands()} <= {*text.split()}


def test_unknown_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "fish"]) == 78
    assert "completion: found 'fish', allowed: bash" in capsys.readouterr().err
