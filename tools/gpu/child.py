"""A measurement in a process of its own: how it is started, how it answers, and what is made of one
that does not."""

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
_NO_MEMORY = ("OutOfMemoryError", "CUDA out of memory", "MemoryError", "Cannot allocate memory")


def answer(measure: Callable[..., Mapping[str, float]]) -> None:
    """The whole program: `measure` with what it is asked for as JSON, and `device`; its figures are
    the last line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("about", type=json.loads)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    print(json.dumps(measure(**args.about, device=args.device)), flush=True)


def ask(program: str, about: Mapping[str, Any], device: str, limit_s: float) -> dict[str, Any]:
    """What a program here answers; an `error` where it does not, and whether `memory` was what it
    lacked."""
    command = [
        sys.executable,
        "-W",
        "ignore",
        str(HERE / f"{program}.py"),
        json.dumps(about),
        "--device",
        device,
    ]
    # A session, so that what it has started ends with it.
    started = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        output, errors = started.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"FAILED: not done in {limit_s:g} s", "memory": False}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
    return read(output, errors, started.returncode)


def read(output: str, errors: str, code: int) -> dict[str, Any]:
    """Of what a process has written.

    >>> read("loading\\n{\\"both\\": 0.5}\\n", "", 0)
    {'both': 0.5}
    >>> read("", "Traceback\\ntorch.OutOfMemoryError: CUDA out of memory. Tried ...\\n\\n", 1)
    {'error': 'out of memory', 'memory': True}
    """
    with suppress(ValueError, IndexError):
        if code == 0 and isinstance(found := json.loads(output.splitlines()[-1]), dict):
            return found
    if any(word in errors for word in _NO_MEMORY):
        return {"error": "out of memory", "memory": True}
    if code == -signal.SIGKILL:
        return {"error": "killed, as by a host out of memory", "memory": True}
    last = (errors.strip().splitlines() or [f"exit code {code}"])[-1]
    return {"error": f"FAILED: {last[:160]}", "memory": False}


def sync(device: str) -> None:
    """Wait until the device has done what it was asked for."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def timed(act: Callable[[], object], device: str) -> float:
    """Seconds until it is done on the device."""
    sync(device)
    started = time.perf_counter()
    act()
    sync(device)
    return time.perf_counter() - started


def in_turns(
    acts: Mapping[str, Callable[[], object]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Seconds of each act in every round but the first, which brings pages and kernels."""
    turns = [{name: timed(act, device) for name, act in acts.items()} for _ in range(rounds + 1)]
    return {name: [turn[name] for turn in turns[1:]] for name in acts}


def middle(values: Sequence[float]) -> float:
    """The median."""
    return sorted(values)[len(values) // 2]
