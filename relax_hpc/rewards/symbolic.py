r"""Rewards of mathematics by Math-Verify, which compares values: sets, intervals, equations,
matrices.

Math-Verify only gets the final expression of a response: in a whole response it might take the
first number of an expression for the answer. It runs in another process, which is killed if it
takes too long. A response such as `\boxed{9^{9^{9^9}}}` then gets 0, and the other responses of its
group get their rewards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.reward_settings import MATH_GROUP_LIMIT_S, MATH_LIMIT_S
from relax_hpc.rewards.expression_text import final_expression
from relax_hpc.rewards.final_answer import BOX, answer_end, boxed

try:
    from relax_hpc.rewards.symbolic_process import (
        NO_EXPRESSION,
        RIGHT,
        UNJUDGED,
        WRONG,
        SymbolicProcess,
    )
except ImportError as error:
    raise ConfigError(
        f"{error}; pip install 'relax_hpc[math]', or take math_answer, which compares numbers alone"
    ) from error

if TYPE_CHECKING:
    from relax_hpc.rewards import RewardInput

# Math-Verify 0.9.0 warns of every response that it cannot read, and that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)
_process = SymbolicProcess()
_lock = threading.Lock()


def math_scores(samples: list[RewardInput]) -> list[dict[str, float]]:
    """Scores of responses: `total` is 1 if the final answer equals the right one, else 0.

    Answers are compared as mathematics. A response that was cut off gets 0, and so does one that
    cannot be judged: Math-Verify took longer than MATH_LIMIT_S, or needed too much memory. Its
    component `unjudged` is 1. ValueError: the right answer is no expression. TimeoutError: the
    right answer cannot be read in time.
    """
    return _scores(samples, final_expression)


def math_boxed_scores(samples: list[RewardInput]) -> list[dict[str, float]]:
    r"""Return `math_scores` for the content of the last `\boxed{...}` of each response; 0 for one
    without it."""
    return _scores(samples, boxed, needs_box=True)


def math(samples: list[RewardInput]) -> list[float]:
    """Return the totals of `math_scores`."""
    return [scores["total"] for scores in math_scores(samples)]


def math_boxed(samples: list[RewardInput]) -> list[float]:
    """Return the totals of `math_boxed_scores`."""
    return [scores["total"] for scores in math_boxed_scores(samples)]


def close() -> None:
    """End the process of Math-Verify; the next call of a reward starts it again."""
    with _lock:
        _process.close()


def _scores(
    samples: list[RewardInput], expression_of: Callable[[str], str], needs_box: bool = False
) -> list[dict[str, float]]:
    with _lock:
        _check_answer(samples[0].answer)
        deadline = time.monotonic() + MATH_GROUP_LIMIT_S
        scores = []
        for index, sample in enumerate(samples):
            text = answer_end(sample)
            is_read = sample.finish_reason == "stop" and (BOX in text or not needs_box)
            share_s = (deadline - time.monotonic()) / (len(samples) - index)
            verdict = WRONG
            if is_read:
                response = (expression_of(text), text)
                verdict = _process.ask(sample.answer, response, min(MATH_LIMIT_S, share_s))
            is_right, is_unjudged = verdict == RIGHT, verdict == UNJUDGED
            scores.append({"total": float(is_right), "unjudged": float(is_unjudged)})
        return scores


def _check_answer(answer: str) -> None:
    verdict = _process.ask(answer, None, MATH_LIMIT_S)
    if verdict == NO_EXPRESSION:
        raise ValueError(f"answer: found {answer[:100]!r}, allowed: a mathematical expression")
    if verdict == UNJUDGED:
        limits = f"{MATH_LIMIT_S:g} s, or too much memory"
        raise TimeoutError(f"answer: reading {answer[:100]!r} took more than {limits}")
