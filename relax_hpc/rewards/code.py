"""Reward of programs that the policy writes: the tests that they pass in a jail.

The column `tests` of a prompt's line has one of two forms. In a list of {"input", "output"}, each
entry has the text that a program reads, and the text that it has to print. Or it is a text of
Python, such as assertions, which runs in a process that the program cannot reach, see
`code_sides`.
"""

from __future__ import annotations

import json
import secrets
import time
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.rewards import code_sides
from relax_hpc.rewards.code_sides.judge import BROKEN, PASSED
from relax_hpc.rewards.final_answer import final_text
from relax_hpc.rewards.jail import Jail
from relax_hpc.rewards.program_text import program_of

if TYPE_CHECKING:
    from relax_hpc.base.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

Pair = tuple[str, str]
"""Text that a program reads, and text that it has to print."""
_CALLING_FORMS = ("functional", "function", "function_call", "call_based", "method")
"""Names in data sets for tests whose input is the arguments of a function."""
_MAIN = """import os, sys
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from code_sides.{side} import main
del sys.path[0]
main({path!r})
"""


class Code:
    """1 if the program of a response passes all its tests, else 0; with `reward.code.share` the
    share of the tests that it passes.

    The component `passed` is the passed share of the tests that were run. `objects` is 1 if tests
    in Python compared an object of the program, which is unequal to any other object. OSError: a
    program could not be started. ValueError, TypeError: the prompt has no tests, or they cannot
    run.
    """

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: programs cannot be isolated on this machine."""
        self._settings = settings.code
        self._jail = Jail(settings.code)

    def __call__(self, sample: RewardInput) -> dict[str, float]:
        tests = sample.metadata.get("tests")
        deadline = time.monotonic() + self._settings.timeout_s
        program = program_of(final_text(sample))
        if isinstance(tests, str) and tests.strip():
            return self._python_tests(program, tests, deadline)
        return self._printed(program, _pairs(tests), deadline)

    def _printed(self, program: str, pairs: list[Pair], deadline: float) -> dict[str, float]:
        """Scores of a program by its output for each input of ``pairs``."""
        passed = run = 0
        for text, expected in pairs if program else ():
            left_s = deadline - time.monotonic()
            is_right = left_s > 0 and self._prints(program, text, expected, left_s)
            run, passed = run + 1, passed + is_right
            if not (is_right or self._settings.share):
                break
        share = passed / len(pairs)
        total = share if self._settings.share else float(passed == len(pairs))
        return {"total": total, "passed": passed / max(1, run)}

    def _prints(self, program: str, text: str, expected: str, left_s: float) -> bool:
        ran = self._jail.run(program, text, left_s)
        return ran.in_time and ran.code == 0 and _lines(ran.output) == _lines(expected)

    def _python_tests(self, program: str, tests: str, deadline: float) -> dict[str, float]:
        """Scores of a program by tests written in Python. ValueError: the tests are broken."""
        left_s = deadline - time.monotonic()
        verdict: dict[str, Any] = {}
        if program and left_s > 0:
            run = self._same_process if self._settings.same_process else self._two_processes
            verdict = run(program, tests, left_s)
        if verdict.get("verdict") == BROKEN:
            raise ValueError(f"tests: {verdict['detail']}")
        passed = float(verdict.get("verdict") == PASSED)
        return {"total": passed, "passed": passed, "objects": float(verdict.get("objects", False))}

    def _two_processes(self, program: str, tests: str, left_s: float) -> dict[str, Any]:
        """Verdict of the process of the tests; empty if the time was over. OSError: it could not be
        started."""
        program_files = {
            "main.py": _MAIN.format(side="program", path="program.py"),
            "program.py": program,
        }
        judge_files = {"main.py": _MAIN.format(side="judge", path="tests.py"), "tests.py": tests}
        sides = _side_files()
        ran = self._jail.run_pair(sides | program_files, sides | judge_files, left_s)
        if not ran.in_time:
            return {}
        line = ran.output.rpartition("\n")[2]
        try:
            return json.loads(line) if line else {}
        except ValueError:
            raise OSError(f"the tests could not be started: {ran.output[-500:]}") from None

    def _same_process(self, program: str, tests: str, left_s: float) -> dict[str, Any]:
        """Verdict of tests that run in the process of the program, which can forge it."""
        secret = secrets.token_hex(16)
        ran = self._jail.run(f"{program}\n\n{tests}\n\nprint()\nprint({secret!r})\n", "", left_s)
        is_done = ran.in_time and ran.code == 0 and _lines(ran.output)[-1:] == [secret]
        return {"verdict": PASSED} if is_done else {}


def _pairs(tests: Any) -> list[Pair]:
    """Inputs and outputs of ``tests``. ValueError, TypeError: they have another form."""
    if not isinstance(tests, list) or not tests:
        allowed = 'a list of {"input", "output"}, or Python'
        raise ValueError(f"tests: found {str(tests)[:100]!r}, allowed: {allowed}")
    for test in tests:
        _check_form(test)
    pairs = [(test["input"], test["output"]) for test in tests]
    for text, expected in pairs:
        if not isinstance(text, str) or not isinstance(expected, str):
            raise TypeError("tests: found an input or output that is no text")
    return pairs


def _check_form(test: Any) -> None:
    """ValueError: ``test`` calls a function, as in some data sets, instead of giving a program its
    input."""
    if not isinstance(test, dict):
        return
    for key in ("testtype", "type"):
        form = test.get(key)
        if form in _CALLING_FORMS:
            raise ValueError(f"tests: {key}: found {form!r}, allowed: tests of a program's output")
    for key in ("fn_name", "func_name", "function_name"):
        if test.get(key):
            raise ValueError(f"tests: {key}: found {str(test[key])[:40]!r}, allowed: nothing")


@cache
def _side_files() -> dict[str, str]:
    """Texts of the modules of `code_sides`, by their paths in a jail."""
    folder = Path(code_sides.__path__[0])
    paths = sorted(folder.glob("*.py"))
    return {f"{folder.name}/{path.name}": path.read_text(encoding="utf-8") for path in paths}


def _lines(text: str) -> list[str]:
    """Lines of ``text`` without blanks at their ends, and without blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
