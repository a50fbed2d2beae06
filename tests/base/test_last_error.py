"""The error that ended a program is found in its log, whatever was printed around it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from relax_hpc.base.last_error import find_last_error, is_temporary, mask_numbers, read_last_error

SGLANG = """\
/x/awq.py:53: UserWarning: Only CUDA, HIP and XPU support AWQ currently.
  warnings.warn(f"Only CUDA, HIP and XPU support AWQ currently.")
[2026-11-26 23:33:08] Cuda graph is disabled because of using torch native attention backend
[2026-11-26 23:33:10] Scheduler hit an exception: Traceback (most recent call last):
  File "/x/sglang/srt/managers/scheduler.py", line 6082, in run_scheduler_process
    scheduler = Scheduler(server_args, port_args)
                ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^
  File "/x/sglang/srt/mem_cache/kv_cache_configurator.py", line 2220, in _profile_available_bytes
    raise ValueError(
ValueError: Loaded weights leave no GPU memory. Raise --mem-fraction-static above 0.004.

[2026-11-26 23:33:10] Received sigquit from a child process. It usually means the child failed.
"""
CONSEQUENCE = """\
Traceback (most recent call last):
  File "/x/sglang/srt/entrypoints/engine.py", line 9, in _launch
    data = reader.recv()
EOFError
"""
GROUP = """
import asyncio
async def fail(): raise ValueError("inner")
async def main():
    async with asyncio.TaskGroup() as tasks: tasks.create_task(fail())
asyncio.run(main())
"""
CPLUSPLUS = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: no kernel image is available for execution on the device
Exception raised from create at /pytorch/c10/util/Exception.cpp:88 (most recent call first):
"""


def printed(program: str, *words: str) -> str:
    """Everything that a real program prints."""
    command = [sys.executable, "-X", "faulthandler", *words, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return result.stdout + result.stderr


def test_the_error_of_an_engine_is_its_schedulers() -> None:
    error = find_last_error(SGLANG)
    assert error.text == (
        "ValueError: Loaded weights leave no GPU memory. Raise --mem-fraction-static above 0.004."
    )
    assert [Path(file).name for file in error.files] == ["scheduler.py", "kv_cache_configurator.py"]
    assert find_last_error(SGLANG + CONSEQUENCE) == error, "the parent's error is a consequence"
    assert find_last_error(CONSEQUENCE).text == "EOFError"


@pytest.mark.parametrize(
    ("program", "text"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise KeyError('x') from ValueError('cause')", "KeyError: 'x'"),
        (GROUP, "ValueError: inner"),
        ("raise RuntimeError('first line\\nsecond line')", "RuntimeError: first line"),
        ("raise RuntimeError('see this:\\nsecond line')", "RuntimeError: see this: second line"),
        ("class Odd(Exception): ...\nraise Odd", "Odd"),
        ("import os; os.abort()", "Fatal Python error: Aborted"),
        ("x = (", "SyntaxError: '(' was never closed"),
        ("print('all is well')", ""),
    ],
)
def test_errors_of_real_programs(program: str, text: str) -> None:
    assert find_last_error(printed(program)).text == text


def test_errors_of_other_languages() -> None:
    assert find_last_error(CPLUSPLUS).text.startswith("what(): CUDA error: no kernel image")
    aborted = f"{CPLUSPLUS}Fatal Python error: Aborted\n\nThread 0x7f (most recent call first):\n"
    assert find_last_error(aborted).text.startswith("what(): CUDA error: no kernel image")
    text = "/x/python: error while loading shared libraries: libmpi.so.12: cannot open"
    assert find_last_error(text).text.startswith("error while loading shared libraries: libmpi")


def test_only_the_part_of_a_log_that_belongs_to_this_start_counts(tmp_path: Path) -> None:
    log = tmp_path / "engine-0.log"
    log.write_text(SGLANG)
    start = log.stat().st_size
    assert read_last_error(log, start).text == ""
    with log.open("a") as file:
        file.write(CONSEQUENCE)
    assert read_last_error(log, start).text == "EOFError"
    log.write_text(CPLUSPLUS)
    assert "no kernel image" in read_last_error(log, start).text, "the log was cut meanwhile"
    assert read_last_error(tmp_path / "missing.log").text == ""


def test_a_log_of_many_tracebacks_without_an_error_is_read_in_linear_time() -> None:
    tracebacks = "rank 0: Traceback (most recent call last):\n" * 24_000
    start_s = time.monotonic()
    assert find_last_error(tracebacks).text == ""
    assert find_last_error(f"{tracebacks}ValueError: too small").text == "ValueError: too small"
    # Quadratic time would be minutes.
    assert time.monotonic() - start_s < 20.0


def test_sizes_and_folders_make_no_other_error() -> None:
    first, second = (
        f"needs {size} MiB of /logs/inc-{number:06d}" for size, number in ((1.5, 1), (20, 2))
    )
    assert mask_numbers(first) == mask_numbers(second) != mask_numbers("needs a GPU")


@pytest.mark.parametrize(
    ("text", "passes"),
    [
        ("OSError: [Errno 98] Address already in use", True),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 60s", True),
        ("OSError: [Errno 116] Stale file handle: '/lustre/model/config.json'", True),
        ("ConnectionRefusedError: [Errno 111] Connection refused", True),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("ValueError: Loaded weights leave no GPU memory for the KV cache", False),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'model.safetensors'", False),
        ("ValueError: watchdog_timeout must be positive", False),
    ],
)
def test_errors_of_networks_and_disks_may_pass(text: str, passes: bool) -> None:
    assert is_temporary(text) is passes
