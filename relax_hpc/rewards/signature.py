"""Checks of a user's reward: its parameters, and how one for another trainer is adapted."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from relax_hpc.rewards import find_reward
from relax_hpc.signatures import method_of, misfit, parameters_of

_RULE = "a reward gets one parameter: `sample`, or `samples` for all samples of a prompt"
_ADAPTERS = {
    "verl": (
        {"data_source", "solution_str", "ground_truth"},
        "def score(sample): return {name}(sample.metadata.get('data_source'), "
        "sample.response_text, sample.answer, sample.metadata)",
    ),
    "verl's batches": (
        {"data_sources", "solution_strs", "ground_truths"},
        "def score(samples): return {name}([s.metadata.get('data_source') for s in samples], "
        "[s.response_text for s in samples], [s.answer for s in samples], "
        "[s.metadata for s in samples])",
    ),
    "TRL": (
        {"completions"},
        "def score(samples): return {name}(prompts=[s.prompt for s in samples], "
        "completions=[s.response_text for s in samples], answer=[s.answer for s in samples])",
    ),
    "OpenRLHF": (
        {"queries"},
        "def score(samples): return {name}([s.prompt + s.response_text for s in samples], "
        "[s.prompt for s in samples], [s.answer for s in samples])",
    ),
}
"""Trainer -> names of parameters by which its rewards are known, and a function that calls one."""


def reward_misfits(name: str) -> Iterator[str]:
    """Mistakes in the parameters of the reward ``name``, a user's own, one line each. ConfigError:
    there is no such reward.

    Nothing of it is called, and of a class no object is made.
    """
    reward, method = find_reward(name)
    if not isinstance(reward, type):
        yield from function_misfits(getattr(reward, method) if method else reward, name)
        return
    text = misfit(reward)
    if text:
        yield f"{name!r} {text}; an object of the class is made without arguments"
    called = method_of(reward, method or "__call__")
    if called is None:
        yield f"{name!r}: found a class without `__call__`; define `def __call__(self, sample)`"
    else:
        yield from function_misfits(called, name)


def function_misfits(reward: Callable[..., Any], name: str) -> Iterator[str]:
    """The same of a function, which messages call ``name``."""
    signature = parameters_of(reward)
    if signature is None:
        return
    parameters = set(signature.parameters)
    for trainer, (names, adapter) in _ADAPTERS.items():
        if names <= parameters:
            called = getattr(reward, "__name__", name)
            text = adapter.format(name=called)
            yield f"{name!r} takes {signature}, as {trainer} calls it; {_RULE}; name this: {text}"
            return
    if misfit(reward, "sample"):
        yield f"{name!r} takes {signature}; {_RULE}"
    elif inspect.isgeneratorfunction(reward) or inspect.isasyncgenfunction(reward):
        yield f"{name!r}: found a generator; return a number (of `samples`: a list of numbers)"
