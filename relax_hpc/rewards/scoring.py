"""Scores of a prompt group, asked of a reward, whose failures become named reasons."""

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
MOST_COMPONENTS = 32
"""Components of a sample at most: each is a metric."""
_NAME_CHARS = 64
"""Characters of the name of a component."""


def takes_group(reward: Reward) -> bool:
    """Whether ``reward`` wants all samples of a prompt: its parameter is called `samples`."""
    look = _first_parameter if isinstance(reward, Hashable) else _first_parameter.__wrapped__
    try:
        return look(reward) == "samples"
    except (TypeError, ValueError):  # something built in, which does not say
        return False


@functools.lru_cache(maxsize=64)
def _first_parameter(reward: Reward) -> str:
    return next(iter(inspect.signature(reward).parameters), "")


def is_async(reward: Reward) -> bool:
    """Whether a call of ``reward`` has to be awaited."""
    # An object may have a method `__call__` that is `async def`.
    method = getattr(reward, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(inspect.unwrap(reward)) or (
        inspect.iscoroutinefunction(method)
    )


def scores(reward: Reward, samples: Sequence[RewardInput]) -> Scores:
    """One for each of ``samples``, or why there are none; never raises an Exception, nor
    SystemExit.

    What has to be awaited is, in an event loop of its own.
    """
    try:
        values, of_group = _called(reward, samples)
        if any(map(inspect.isawaitable, values)):
            values = asyncio.run(_awaited(values))
        return _checked_of(reward, values[0] if of_group else values, len(samples))
    except (Exception, SystemExit) as error:  # a user's function may raise anything, and end itself
        return _raised(error)


async def scores_soon(reward: Reward, samples: Sequence[RewardInput]) -> Scores:
    """Scores as of `scores`, in the event loop that runs: all samples of the group are asked for at
    once."""
    try:
        values, of_group = _called(reward, samples)
        values = await _awaited(values)
        return _checked_of(reward, values[0] if of_group else values, len(samples))
    except (Exception, SystemExit) as error:
        return _raised(error)


def _checked_of(reward: Reward, values: Any, count: int) -> Scores:
    """`checked`; an error names the place where ``reward`` is defined."""
    result = checked(values, count)
    if isinstance(result, RewardError):
        return replace(result, origin=locate_definition(reward))
    return result


def checked(values: Any, count: int) -> Scores:
    """The scores of ``count`` samples that a reward has given as ``values``, or why they are
    none."""
    if (
        isinstance(values, str | bytes | Mapping)
        or not hasattr(values, "__len__")
        or not hasattr(values, "__iter__")
    ):
        return RewardError(
            "reward_wrong_count", f"returned {type(values).__name__}, expected a list of {count}"
        )
    if len(values) != count:
        return RewardError(
            "reward_wrong_count", f"returned {len(values)} values for {count} samples"
        )
    found: list[Score] = []
    for value in values:
        if isinstance(score := _score(value), RewardError):
            return score
        found.append(score)
    return found


def _called(reward: Reward, samples: Sequence[RewardInput]) -> tuple[list[Any], bool]:
    """Results of calling ``reward``, and whether that is one for the group, and not one for each
    sample."""
    of_group = takes_group(reward)
    return [reward(list(samples))] if of_group else [reward(sample) for sample in samples], of_group


async def _awaited(values: list[Any]) -> list[Any]:
    tasks = [asyncio.ensure_future(_one(value)) for value in values]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


async def _one(value: Any) -> Any:
    try:
        return await value if inspect.isawaitable(value) else value
    except (SystemExit, asyncio.CancelledError) as end:
        if (task := asyncio.current_task()) and task.cancelling():
            raise
        # A task that raises the one would end the event loop, and the other be taken for one that
        # nobody waits for.
        raise _Ended(end) from end


class _Ended(Exception):
    """Wrapper of an error of a user's reward that no task of ours may raise itself."""


def _raised(error: BaseException) -> RewardError:
    error = error.args[0] if isinstance(error, _Ended) else error
    reason = error.reason if isinstance(error, Away) else "reward_exception"
    return RewardError(reason, describe_error(error), locate_error(error))


def _score(value: Any) -> Score | RewardError:
    if not isinstance(value, Mapping):
        total = _number(value)
        return total if isinstance(total, RewardError) else Score(total)
    if TOTAL not in value or len(value) > MOST_COMPONENTS + 1:
        names = ", ".join(map(str, value))[:200] or "nothing"
        expected = f"`{TOTAL}`, and at most {MOST_COMPONENTS} components"
        return RewardError(
            "reward_not_a_number", f"returned a mapping of {names}; expected {expected}"
        )
    components: dict[str, float] = {}
    for name, each in value.items():
        if isinstance(number := _number(each), RewardError):
            return RewardError(number.reason, f"{name}: {number.detail}")
        components[str(name)[:_NAME_CHARS]] = number
    return Score(components.pop(TOTAL), components)


def _number(value: Any) -> float | RewardError:
    # What numpy, torch and their like give for one number: an array without dimensions.
    if getattr(value, "shape", None) == () and not isinstance(value, numbers.Real):
        value = value.item()
    if not isinstance(value, numbers.Real):
        return RewardError("reward_not_a_number", f"returned {_kind(value)}, expected one number")
    if not abs(value) <= FLOAT32_MAX:
        return RewardError("reward_not_finite", f"returned {value}")
    return float(value)


def _kind(value: Any) -> str:
    """Description of what a reward has returned instead of a number."""
    if value is None:
        return "None (some path through the function has no `return`)"
    if isinstance(value, str):
        return f"str {value[:_NAME_CHARS]!r} (use float(...))"
    shape = f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
    return f"{type(value).__name__}{shape}"
