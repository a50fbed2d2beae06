"""Calls of a reward for a prompt group. Failures become errors with a named reason."""

from __future__ import annotations

import asyncio
import functools
import inspect
import numbers
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_hpc.base.error_origin import describe_error, locate_definition, locate_error
from relax_hpc.rewards import Reward, RewardError, RewardInput, Score, Scores
from relax_hpc.rewards.service import Away

FLOAT32_MAX = 3.4028234663852886e38
TOTAL = "total"
"""Name of the component that is learned from."""
MAX_COMPONENTS = 32
"""Maximum number of components of a sample. Each is a metric."""
_NAME_CHARS = 64
"""Maximum length of the name of a component."""


def takes_group(reward: Reward) -> bool:
    """Whether ``reward`` takes all samples of a prompt: its parameter is called `samples`."""
    # The cache needs a hashable argument.
    first_parameter = (
        _first_parameter if isinstance(reward, Hashable) else _first_parameter.__wrapped__
    )
    try:
        return first_parameter(reward) == "samples"
    except (TypeError, ValueError):
        # Some functions in C have no signature.
        return False


@functools.lru_cache(maxsize=64)
def _first_parameter(reward: Reward) -> str:
    return next(iter(inspect.signature(reward).parameters), "")


def is_async(reward: Reward) -> bool:
    """Whether a call of ``reward`` has to be awaited."""
    # The method `__call__` of an object may be `async def`.
    method = getattr(reward, "__call__", None)  # noqa: B004
    is_function = inspect.iscoroutinefunction(inspect.unwrap(reward))
    return is_function or inspect.iscoroutinefunction(method)


def scores(reward: Reward, samples: Sequence[RewardInput]) -> Scores:
    """One score for each of ``samples``, or an error. Never raises Exception or SystemExit.

    Awaitable values are awaited in a new event loop.
    """
    try:
        values, takes_all = _call(reward, samples)
        if any(map(inspect.isawaitable, values)):
            values = asyncio.run(_await_all(values))
        return _check_values(reward, values[0] if takes_all else values, len(samples))
    except (Exception, SystemExit) as error:
        # A user's function may raise anything, and may call sys.exit.
        return _error_from(error)


async def scores_soon(reward: Reward, samples: Sequence[RewardInput]) -> Scores:
    """Like `scores`, in the running event loop. All samples of the group are scored
    concurrently."""
    try:
        values, takes_all = _call(reward, samples)
        values = await _await_all(values)
        return _check_values(reward, values[0] if takes_all else values, len(samples))
    except (Exception, SystemExit) as error:
        return _error_from(error)


def _check_values(reward: Reward, values: Any, count: int) -> Scores:
    """Like `checked`; an error has the line where ``reward`` is defined."""
    result = checked(values, count)
    if isinstance(result, RewardError):
        return replace(result, origin=locate_definition(reward))
    return result


def checked(values: Any, count: int) -> Scores:
    """Scores from the ``values`` that a reward has returned for ``count`` samples, or an error."""
    is_list = hasattr(values, "__len__") and hasattr(values, "__iter__")
    if not is_list or isinstance(values, str | bytes | Mapping):
        return RewardError(
            "reward_wrong_count", f"returned {type(values).__name__}, expected a list of {count}"
        )
    if len(values) != count:
        return RewardError(
            "reward_wrong_count", f"returned {len(values)} values for {count} samples"
        )
    result: list[Score] = []
    for value in values:
        score = _score(value)
        if isinstance(score, RewardError):
            return score
        result.append(score)
    return result


def _call(reward: Reward, samples: Sequence[RewardInput]) -> tuple[list[Any], bool]:
    """Results of calling ``reward``: one result and True if it takes all samples, otherwise one for
    each sample and False."""
    if takes_group(reward):
        return [reward(list(samples))], True
    return [reward(sample) for sample in samples], False


async def _await_all(values: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(_await_value(value)) for value in values]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _await_value(value: Any) -> Any:
    try:
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, asyncio.CancelledError) as end:
        task = asyncio.current_task()
        if task and task.cancelling():
            raise
        # SystemExit in a task would end the event loop, and CancelledError from a user's reward
        # would look like a cancellation of this task.
        raise _WrappedEnd(end) from end


class _WrappedEnd(Exception):
    """Wrapper of SystemExit or CancelledError from a user's reward."""


def _error_from(error: BaseException) -> RewardError:
    error = error.args[0] if isinstance(error, _WrappedEnd) else error
    reason = error.reason if isinstance(error, Away) else "reward_exception"
    return RewardError(reason, describe_error(error), locate_error(error))


def _score(value: Any) -> Score | RewardError:
    if not isinstance(value, Mapping):
        total = _number(value)
        return total if isinstance(total, RewardError) else Score(total)
    if TOTAL not in value or len(value) > MAX_COMPONENTS + 1:
        names = ", ".join(map(str, value))[:200] or "nothing"
        expected = f"`{TOTAL}`, and at most {MAX_COMPONENTS} components"
        return RewardError(
            "reward_not_a_number", f"returned a mapping of {names}; expected {expected}"
        )
    components: dict[str, float] = {}
    for name, component in value.items():
        number = _number(component)
        if isinstance(number, RewardError):
            return RewardError(number.reason, f"{name}: {number.detail}")
        components[str(name)[:_NAME_CHARS]] = number
    return Score(components.pop(TOTAL), components)


def _number(value: Any) -> float | RewardError:
    # numpy and torch return one number as an array without dimensions.
    if getattr(value, "shape", None) == () and not isinstance(value, numbers.Real):
        value = value.item()
    if not isinstance(value, numbers.Real):
        detail = f"returned {_describe_value(value)}, expected one number"
        return RewardError("reward_not_a_number", detail)
    real: Any = value
    # Written so that NaN fails, too.
    if not abs(real) <= FLOAT32_MAX:
        return RewardError("reward_not_finite", f"returned {value}")
    return float(value)


def _describe_value(value: Any) -> str:
    """Description of a value that a reward has returned instead of a number."""
    if value is None:
        return "None (some path through the function has no `return`)"
    if isinstance(value, str):
        return f"str {value[:_NAME_CHARS]!r} (use float(...))"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"{type(value).__name__}{shape}"
