"""Rewards of mathematics by Math-Verify, which takes answers for what they mean: sets, intervals, equations, matrices.

Its time limits are alarms of the main thread, which reward workers have to themselves. It takes a second to import.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from relax_hpc.errors import ConfigError
from relax_hpc.rewards.maths import LAST, boxed

try:
    from math_verify import parse, verify
    from math_verify.errors import TimeoutException
except ImportError as error:
    raise ConfigError(
        f"{error}; pip install 'relax_hpc[math]', or take math_answer, which compares numbers and needs nothing"
    ) from error

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

LIMIT_S = 5
"""Seconds for one expression to be read, or two to be compared."""
# It warns of every response that it cannot read.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math(samples: list[RewardInput]) -> list[float]:
    """1 for each response whose final answer is equal to the right one as mathematics, else 0, also if it was cut off.

    LaTeX (boxed expressions first) and plain expressions are looked for, as Math-Verify does. TimeoutError: an
    expression took too long, so that nobody knows. ValueError: the right answer is no expression.
    """
    return _compared(samples, lambda text: text)


def math_boxed(samples: list[RewardInput]) -> list[float]:
    r"""Return `math` for the content of the last `\boxed{...}` of each response; 0 for one without it."""
    return _compared(samples, lambda text: f"\\boxed{{{boxed(text)}}}" if "\\boxed" in text else "")


def _compared(samples: list[RewardInput], part: Callable[[str], str]) -> list[float]:
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("Math-Verify keeps its time limits by alarms, which the main thread alone has")
    right = _right(samples[0].answer)
    return [float(one.finish_reason == "stop" and _equal(right, part(one.response_text[-LAST:]))) for one in samples]


@functools.lru_cache(maxsize=4096)
def _right(answer: str) -> list[Any]:
    """The expressions of a right answer, which may stand as it is, behind ####, or in LaTeX's signs."""
    text = answer.rpartition("####")[2].strip()
    for form in (f"\\boxed{{{text}}}", text):
        found = _read(form)
        if not all(isinstance(one, str) for one in found):
            return found
    raise ValueError(f"answer: found {answer[:100]!r}, allowed: a mathematical expression")


def _equal(right: list[Any], text: str) -> bool:
    """Whether a response's ``text`` ends at what ``right`` is. TimeoutError: nobody knows."""
    found = _read(text) if text else []
    try:
        return bool(found) and verify(right, found, timeout_seconds=LIMIT_S, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"comparing {text[-100:]!r} took more than {LIMIT_S} s") from error
    except Exception:  # sympy's have no other base: what cannot be compared is not equal
        return False


def _read(text: str) -> list[Any]:
    """The expressions at the end of ``text``. TimeoutError: nobody knows."""
    try:
        return parse(text, parsing_timeout=LIMIT_S, raise_on_error=True)
    except TimeoutException as error:
        raise TimeoutError(f"reading {text[-100:]!r} took more than {LIMIT_S} s") from error
    except Exception:  # of sympy and antlr: it is no expression
        return []
