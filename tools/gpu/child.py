"""Start a measurement in its own process, and read its figures.

A program reports its figures as one JSON object on one line; the last such line counts. It
may report several times (`note`), so that a process that fails or reaches its deadline keeps the
figures that it had by then.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
LOG_VARIABLE = "RELAX_CHECK_LOG"
"""Environment variable that names a file to which the output of failed programs is added."""
_OUT_OF_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "MemoryError", "Cannot allocate memory")
_ERROR_CHARACTERS = 160


def answer(measure: Callable[..., Mapping[str, Any]]) -> None:
    """Main function of a program: call ``measure`` and report its figures.

    The command line has the arguments of ``measure`` as one JSON object, and `--device`.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("arguments", type=json.loads)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    note(measure(**options.arguments, device=options.device))


def note(figures: Mapping[str, Any]) -> None:
    """Report all ``figures`` so far."""
    print(json.dumps(figures), flush=True)


def ask(
    program: str,
    arguments: Mapping[str, Any],
    device: str,
    limit_s: float,
    environment: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Figures of a program in this folder.

    If the program fails or takes more than ``limit_s`` seconds, they are the figures that it
    reported before, `error`, and `memory` (whether it ran out of memory).
    """
    command = [sys.executable, "-W", "ignore", str(HERE / f"{program}.py")]
    command += [json.dumps(arguments), "--device", device]
    # In a new session, so that the kill below also reaches the processes that it starts.
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | dict(environment or {}),
    )
    timed_out = False
    try:
        output, errors = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        timed_out = True
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if timed_out:
            output, errors = process.communicate()
    if timed_out:
        error = {"error": f"FAILED: not done in {limit_s:g} s", "memory": False}
        figures = last_report(output) | error
    else:
        figures = read(output, errors, process.returncode)
    if "error" in figures and LOG_VARIABLE in os.environ:
        with Path(os.environ[LOG_VARIABLE]).open("a") as log:
            log.write(f"== {program} {json.dumps(arguments)}\n{output}\n{errors}\n")
    return figures


def read(output: str, errors: str, code: int) -> dict[str, Any]:
    """Figures in the ``output`` of a process with the exit code ``code``, and its error.

    >>> read("loading\\n{\\"both\\": 0.5}\\n", "", 0)
    {'both': 0.5}
    >>> read("", "Traceback\\ntorch.OutOfMemoryError: CUDA out of memory. Tried ...\\n\\n", 1)
    {'error': 'out of memory', 'memory': True}
    >>> read("{\\"first\\": 1}\\n", "ValueError: no", 1)
    {'first': 1, 'error': 'FAILED: ValueError: no', 'memory': False}
    """
    figures = last_report(output)
    if code == 0 and figures:
        return figures
    if any(text in errors for text in _OUT_OF_MEMORY):
        return figures | {"error": "out of memory", "memory": True}
    if code == -signal.SIGKILL:
        return figures | {"error": "killed, as by a host out of memory", "memory": True}
    last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
    return figures | {"error": f"FAILED: {last[:_ERROR_CHARACTERS]}", "memory": False}


def last_report(output: str) -> dict[str, Any]:
    """The last line of ``output`` that is a JSON object; empty if no line is.

    >>> last_report('{"a": 1}\\n{"a": 1, "b": 2}\\n{cut off')
    {'a': 1, 'b': 2}
    """
    for line in reversed(output.splitlines()):
        with suppress(ValueError):
            figures = json.loads(line)
            if isinstance(figures, dict):
                return figures
    return {}


def sync(device: str) -> None:
    """Wait until the device has finished all of its work."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def timed(act: Callable[[], object], device: str) -> float:
    """Seconds until ``act`` is finished on the device."""
    sync(device)
    started = time.perf_counter()
    act()
    sync(device)
    return time.perf_counter() - started


def in_turns(
    acts: Mapping[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each act in each of ``rounds`` rounds.

    One more round comes first and is not counted, because it loads pages and kernels.
    """
    seconds: dict[str, list[float]] = {name: [] for name in acts}
    for _ in range(rounds + 1):
        for name, act in acts.items():
            seconds[name].append(timed(act, device))
    return {name: values[1:] for name, values in seconds.items()}


def middle(values: Sequence[float]) -> float:
    """The median. With an even number of values, the larger of the two in the middle."""
    return sorted(values)[len(values) // 2]
