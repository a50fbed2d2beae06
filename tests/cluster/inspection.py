"""Commands that look into the processes of a run on the sandbox."""

from __future__ import annotations

import contextlib
import os
import pty
import subprocess
import sys

from tests.cluster.slurm_runs import SlurmRun


def attach_terminal(run: SlurmRun, *arguments: str, text: str) -> str:
    """Type ``text`` into the shell of a rank, and end the shell. Return the terminal's
    output."""
    terminal, end = pty.openpty()
    command = [sys.executable, "-m", "relax_hpc", "attach", str(run.run.root), *arguments]
    environment = os.environ | run.sandbox.environment() | {"SHELL": "/bin/sh", "TERM": "dumb"}
    with subprocess.Popen(
        command, stdin=end, stdout=end, stderr=end, env=environment, start_new_session=True
    ) as process:
        os.close(end)
        os.write(terminal, f"{text}\nexit\n".encode())
        output = b""
        # Reading fails with EIO when the last process has closed the other end.
        with contextlib.suppress(OSError):
            while piece := os.read(terminal, 1 << 16):
                output += piece
        process.wait(60)
    os.close(terminal)
    return output.decode(errors="replace")


def assert_can_be_inspected(run: SlurmRun) -> None:
    """Ranks show their stacks from their own nodes, and programs run there too."""
    stacks = run.call("stacks", "--group", "actor")
    ranks, nodes = run.processes("actor"), run.nodes_of("actor")
    for rank, process in enumerate(ranks):
        title = f"== actor/actor rank {rank}, process {process.pid} on {nodes[rank]}"
        assert title in stacks, stacks
    assert stacks.count("trainer_role.py") >= len(ranks)
    words = ["sh", "-c", 'echo "$SLURMD_NODENAME $RELAX_PID $RELAX_RANK"']
    answer = run.call("attach", "--group", "actor", "--rank", "1", "--", *words)
    assert answer.split() == [nodes[1], str(ranks[1].pid), "1"]
    words = ["sh", "-c", "echo $RELAX_ROLE"]
    answer = run.call("attach", "--group", "hub", "--role", "controller", "--", *words)
    assert answer.split() == ["controller"]
