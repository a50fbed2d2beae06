"""docs/tutorial.md: a newcomer's first 30 minutes. All files are written and all commands run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.guardian import session_folder
from tests.helpers.pages import ROOT, examples
from tests.helpers.slurm_sandbox import requires_sandbox

pytestmark = [pytest.mark.run, pytest.mark.slurm]
PAGE = ROOT / "docs" / "tutorial.md"
STEPS = 2
"""Steps of every run of the test."""
TIMEOUT_S = 300.0
MARK = "--- next command"


@pytest.fixture
def folder() -> Iterator[Path]:
    """An empty folder. The path of pytest's folders is too long for the sockets of Slurm."""
    requires_sandbox()
    path = Path(tempfile.mkdtemp(dir=session_folder()))
    yield path
    command = [sys.executable, "-m", "relax_hpc", "sandbox", "down", "sandbox"]
    subprocess.run(command, cwd=path, capture_output=True, timeout=60)
    shutil.rmtree(path, ignore_errors=True)


def shortened(command: str) -> str:
    """The same command with fewer steps, and the checkpoint of the last one."""
    command = re.sub(r"--steps \d+", f"--steps {STEPS}", command)
    return re.sub(r"step-\d{6}", f"step-{STEPS:06}", command)


def test_every_command_works(folder: Path) -> None:
    commands: list[tuple[str, list[str]]] = []
    for section in examples(PAGE):
        commands += section.commands
        for name, text in section.files.items():
            (folder / name).write_text(text.replace("samples: 200", "samples: 20"))
    # One shell for all, because a command sets variables for those after it.
    lines = [f"{shortened(command)}\necho '{MARK}'" for command, _ in commands]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    variables = {"PATH": path, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    done = subprocess.run(
        ["bash", "-ec", "\n".join(lines)],
        cwd=folder,
        env=os.environ | variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    outputs = done.stdout.split(MARK)
    assert len(outputs) == len(commands) + 1
    for (command, expected), output in zip(commands, outputs, strict=False):
        printed = iter(output.splitlines())
        for text in expected:
            assert any(text in line for line in printed), f"$ {command}: no {text!r} in {output}"
