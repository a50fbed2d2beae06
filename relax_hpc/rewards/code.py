"""Reward of programs that the policy writes: the tests that they pass, run apart from everything else.

The tests are the column `tests` of a prompt's line: a list of {"input", "output"}, what a program reads and has to
print, or a text of Python that goes on from the program, such as assertions. A program sees its input alone, and can
look its assertions up: the former is the better choice.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from relax_hpc.rewards.final_answer import final_text
from relax_hpc.rewards.jail import Jail
from relax_hpc.rewards.program_text import program_of

if TYPE_CHECKING:
    from relax_hpc.reward_settings import RewardSettings
    from relax_hpc.rewards import RewardInput

Test = Callable[[float], bool]
"""Whether the program passes, in so many seconds."""


class Code:
    """1 if the last fenced block of a response passes all its tests, else 0; or the share of them, see `reward.code`.

    `passed`, a component, is the share of those that were run. OSError: a program could not begin. ValueError,
    TypeError: the prompt has no tests.
    """

    def __init__(self, settings: RewardSettings) -> None:
        """ConfigError: programs cannot be kept apart on this machine."""
        self._settings = settings.code
        self._jail = Jail(settings.code)

    def __call__(self, sample: RewardInput) -> dict[str, float]:
        program = program_of(final_text(sample))
        tests = list(self._tests(program, sample.metadata.get("tests")))
        passed = run = 0
        until = time.monotonic() + self._settings.timeout_s
        for test in tests if program else ():
            left = until - time.monotonic()
            run, well = run + 1, left > 0 and test(left)
            passed += well
            if not (well or self._settings.share):
                break
        share = passed / len(tests)
        total = share if self._settings.share else float(passed == len(tests))
        return {"total": total, "passed": passed / max(1, run)}

    def _tests(self, program: str, tests: Any) -> Iterator[Test]:
        if isinstance(tests, str) and tests.strip():
            yield lambda left: self._goes_on(program, tests, left)
            return
        if not isinstance(tests, list) or not tests:
            raise ValueError(f'tests: found {str(tests)[:100]!r}, allowed: a list of {{"input", "output"}}, or Python')
        for test in tests:
            given, wanted = test["input"], test["output"]
            yield lambda left, given=given, wanted=wanted: self._prints(program, given, wanted, left)

    def _prints(self, program: str, given: str, wanted: str, left: float) -> bool:
        ran = self._jail.run(program, given, left)
        return ran.in_time and ran.code == 0 and _lines(ran.output) == _lines(wanted)

    def _goes_on(self, program: str, tests: str, left: float) -> bool:
        """Whether the tests were come to the end of, which one that ends before does not say."""
        word = secrets.token_hex(16)
        ran = self._jail.run(f"{program}\n\n{tests}\n\nprint()\nprint({word!r})\n", "", left)
        return ran.in_time and ran.code == 0 and _lines(ran.output)[-1:] == [word]


def _lines(text: str) -> list[str]:
    """Lines of ``text`` without blanks at their ends, and without blank lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
