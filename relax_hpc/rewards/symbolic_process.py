"""The process that runs Math-Verify. It is a fork of a process that has imported it, and is killed
if a comparison takes too long.

The time limits of Math-Verify 0.9.0 are alarms: they do not interrupt arithmetic in C. It has no
limit of memory.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import select
import signal
import traceback
from pathlib import Path
from typing import Any, NoReturn

from math_verify import parse, verify
from sympy import FiniteSet

from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.workers.process import ATTEMPTS, is_suspended
from relax_hpc.net.workers.serving import bound_memory
from relax_hpc.rewards.expression_text import (
    contradicts_itself,
    final_expression,
    is_bound,
    is_qualified,
    latex_of,
)
from relax_hpc.rewards.final_answer import BOX
from relax_hpc.rewards.maths import GSM8K_MARK, STATEMENT
from relax_hpc.rewards.number_text import has_scale, read_number

RIGHT, WRONG, UNJUDGED, NO_EXPRESSION = "1", "0", "?", "!"
_MEMORY_MB = 512
"""Megabytes that the process may allocate after its start."""
_VERDICTS_FD = 3
_MARKED = re.compile(r"\$|\\[(\[]|\\boxed")
"""LaTeX marks around an expression."""
_SCIENTIFIC = re.compile(r"\d[eE][-+]?\d")
"""A power of ten whose e Math-Verify 0.9.0 would read as a number."""
_WARM_UP = (r"\frac{1}{2}+\sqrt{2}", r"\{1,2\}\cup[3,4)", r"x^2+2x=-1")


class SymbolicProcess:
    """Process that compares expressions. The first use starts it. If it has died, the next use
    starts it again."""

    # Not a worker of relax_hpc.net.workers, which would start a new interpreter after each
    # expression that takes too long. A fork already has sympy and the caches of the parsers.
    def __init__(self) -> None:
        self._pid = 0
        self._parent_pid = 0
        self._requests_fd = self._verdicts_fd = -1

    def ask(self, answer: str, response: tuple[str, str] | None, limit_s: float) -> str:
        """RIGHT if a response equals the right ``answer``, else WRONG.

        ``response``: its final expression, and its text, which is also read if the right answer has
        several values. With None, the call only checks whether the right answer can be read.
        NO_EXPRESSION: the answer is not an expression. UNJUDGED: the comparison took longer than
        ``limit_s`` or too much memory, or the process died or was suspended in each attempt.
        """
        line = json.dumps([answer, response]).encode() + b"\n"
        for _ in range(ATTEMPTS):
            self._ensure_started()
            verdict = self._exchange(line, limit_s)
            if verdict in (RIGHT, WRONG, NO_EXPRESSION):
                return verdict
            may_retry = not verdict or is_suspended(self._pid)
            self.close()
            if not may_retry:
                break
        return UNJUDGED

    def _exchange(self, line: bytes, limit_s: float) -> str:
        """Verdict on a request. UNJUDGED: not within ``limit_s``. Empty: the process has ended."""
        with contextlib.suppress(BrokenPipeError):
            _write_all(self._requests_fd, line)
            poll = select.poll()
            poll.register(self._verdicts_fd, select.POLLIN)
            if not poll.poll(1000 * max(0.0, limit_s)):
                return UNJUDGED
            return os.read(self._verdicts_fd, 1).decode()
        return ""

    def close(self) -> None:
        """Kill the process, if there is one."""
        if self._pid and self._parent_pid == os.getpid():
            os.kill(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
        for fd in (self._requests_fd, self._verdicts_fd):
            if fd >= 0:
                os.close(fd)
        self._pid = 0
        self._requests_fd = self._verdicts_fd = -1

    def _ensure_started(self) -> None:
        if self._pid and self._parent_pid == os.getpid():
            pid, _ = os.waitpid(self._pid, os.WNOHANG)
            if not pid:
                return
            self._pid = 0
        # Also after a fork of the process that started it: the child must not use its pipes.
        self.close()
        _warm_up()
        requests_fd, self._requests_fd = os.pipe()
        self._verdicts_fd, verdicts_fd = os.pipe()
        self._parent_pid = os.getpid()
        self._pid = os.fork()
        if not self._pid:
            _run(requests_fd, verdicts_fd)
        os.close(requests_fd)
        os.close(verdicts_fd)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


@functools.cache
def _warm_up() -> None:
    """Fill the caches of the parsers, which each new process inherits."""
    for text in _WARM_UP:
        expressions = _read(f"\\boxed{{{text}}}")
        verify(expressions, expressions, timeout_seconds=None)


def _run(requests_fd: int, verdicts_fd: int) -> NoReturn:
    """Answer each request, a line, by one character, until the pipe is closed."""
    try:
        die_with_parent()
        os.dup2(requests_fd, 0)
        os.dup2(verdicts_fd, _VERDICTS_FD)
        os.dup2(2, 1)
        _close_from(_VERDICTS_FD + 1)
        bound_memory(_MEMORY_MB)
        with open(0, encoding="utf-8", closefd=False) as requests:
            for line in requests:
                os.write(_VERDICTS_FD, _verdict(*json.loads(line)).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        # A normal exit would flush the buffers and run the exit handlers of the parent.
        os._exit(0)


def _close_from(first_fd: int) -> None:
    # os.closerange is not used: before close_range (Linux 5.9) it tries each number, up to a
    # billion.
    for path in list(Path("/proc/self/fd").iterdir()):
        if int(path.name) >= first_fd:
            with contextlib.suppress(OSError):
                os.close(int(path.name))


def _verdict(answer: str, response: tuple[str, str] | None) -> str:
    try:
        right = _read_answer(answer)
        if not right:
            return NO_EXPRESSION
        if response is None:
            return RIGHT
        expression, text = response
        for is_misread in (contradicts_itself, is_bound, is_qualified):
            if is_misread(expression) and not is_misread(answer):
                return WRONG
        candidates = _candidates(expression, text, any(map(_has_several_values, right)))
        return RIGHT if any(_equal(right, candidate) for candidate in candidates) else WRONG
    except (MemoryError, RecursionError):
        return UNJUDGED


@functools.lru_cache(maxsize=4096)
def _read_answer(answer: str) -> list[Any]:
    """The expressions of a right answer, which may be plain, follow ####, or stand in LaTeX marks;
    empty: it cannot be read."""
    text = answer.rpartition(GSM8K_MARK)[2].strip()
    if STATEMENT.search(text) and BOX not in text:
        text = final_expression(text)
    forms = [f"\\boxed{{{text}}}"]
    if _MARKED.search(text):
        # Only with marks: in other text that it cannot read as a whole, Math-Verify 0.9.0 reads
        # the first number.
        forms.append(text)
    number = read_number(text)
    if number is not None:
        is_scientific = _SCIENTIFIC.search(text) is not None
        forms.insert(0 if is_scientific else len(forms), f"\\boxed{{{number}}}")
    for form in forms:
        expressions = _read(form)
        if not all(isinstance(expression, str) for expression in expressions):
            return expressions
    return []


def _candidates(expression: str, text: str, takes_several: bool) -> list[str]:
    """Texts for Math-Verify that represent a response. If one of them is right, the response is."""
    candidates = [f"\\boxed{{{expression}}}"] if expression else []
    # Math-Verify 0.9.0 reads a unit without \\text as variables, and the e of 1.5e3 as a number.
    number = read_number(expression)
    if number is not None:
        by_value = f"\\boxed{{{number}}}"
        # Math-Verify 0.9.0 takes "million" for a unit and ignores it, so that only the value is
        # compared.
        candidates = [by_value] if has_scale(expression) else [*candidates, by_value]
    if takes_several:
        candidates.append(text)
    return candidates


def _has_several_values(expression: Any) -> bool:
    return isinstance(expression, FiniteSet) and len(expression.args) > 1


def _equal(right: list[Any], text: str) -> bool:
    expressions = _read(text)
    if not expressions:
        return False
    try:
        return verify(right, expressions, timeout_seconds=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        # Errors of sympy have no common base class. Values that cannot be compared are not equal.
        return False


def _read(text: str) -> list[Any]:
    """The expressions that Math-Verify finds in ``text``; may be empty."""
    try:
        return parse(latex_of(text), parsing_timeout=None, raise_on_error=True)
    except (MemoryError, RecursionError):
        raise
    except Exception:
        # Errors of sympy and antlr have no common base class. The text is not an expression.
        return []
