"""Checks of the parameters of a user's reward. For a reward that was written for another trainer,
the message has an adapter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from relax_hpc.base.signatures import describe_mismatch, method_of, parameters_of
from relax_hpc.rewards import find_reward
from relax_hpc.rewards.scoring import is_async

_RULE = "a reward gets one parameter: `sample`, or `samples` for all samples of a prompt"
_TRAINERS = {
    "verl": {"data_source", "solution_str", "ground_truth"},
    "verl's batches": {"data_sources", "solution_strs", "ground_truths"},
    "TRL": {"completions"},
    "OpenRLHF": {"queries"},
}
"""Trainer -> names of parameters that identify its rewards."""
_PER_SAMPLE = {
    "data_source": "sample.metadata.get('data_source')",
    "solution_str": "sample.response_text",
    "ground_truth": "sample.answer",
    "extra_info": "sample.metadata",
}
"""Arguments of verl's rewards of one sample."""
_PER_GROUP = {
    "data_sources": "s.metadata.get('data_source')",
    "solution_strs": "s.response_text",
    "ground_truths": "s.answer",
    "extra_infos": "s.metadata",
    "prompts": "s.prompt",
    "completions": "s.response_text",
    "queries": "s.prompt + s.response_text",
    **dict.fromkeys(("answer", "answers", "ground_truth", "solution", "target"), "s.answer"),
    **dict.fromkeys(("label", "labels"), "s.answer"),
}
"""Arguments of rewards of several samples -> the item for a sample `s`. The arguments are lists.
Other names are columns of the rows."""
_ALWAYS = {"TRL": ("prompts", "completions", "answer")}
"""Trainer -> arguments for a reward with `**kwargs`."""


def reward_misfits(name: str) -> Iterator[str]:
    """Mistakes in the parameters of the user's reward ``name``, one line each. ConfigError: the
    reward does not exist.

    The reward is not called, and a class is not instantiated.
    """
    reward, method = find_reward(name)
    code = name.partition(":")[2]
    if not isinstance(reward, type):
        yield from function_misfits(getattr(reward, method) if method else reward, name, code)
        return
    text = describe_mismatch(reward)
    if text:
        yield f"{name!r} {text}; an object of the class is made without arguments"
    called = method_of(reward, method or "__call__")
    if called is None:
        yield f"{name!r}: found a class without `__call__`; define `def __call__(self, sample)`"
    else:
        class_name, dot, _ = code.partition(".")
        yield from function_misfits(called, name, f"{class_name}(){dot}{method}")


def function_misfits(reward: Callable[..., Any], name: str, code: str) -> Iterator[str]:
    """Mistakes in the parameters of a function, one line each. ``name``: its name in messages;
    ``code``: its expression in Python, in its module."""
    signature = parameters_of(reward)
    if signature is None:
        return
    trainers = [key for key, names in _TRAINERS.items() if names <= set(signature.parameters)]
    if trainers:
        adapter = _adapter(trainers[0], signature, code, is_async(reward))
        text = f"takes {signature}, as {trainers[0]} calls it; {_RULE}; name this: {adapter}"
        yield f"{name!r} {text}"
    elif describe_mismatch(reward, "sample"):
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        by_name = inspect.Parameter.KEYWORD_ONLY in kinds
        yield f"{name!r} takes {signature}; {_RULE}{', given by position' if by_name else ''}"
    elif inspect.isgeneratorfunction(reward) or inspect.isasyncgenfunction(reward):
        yield f"{name!r}: found a generator; return a number (of `samples`: a list of numbers)"


def _adapter(trainer: str, signature: inspect.Signature, code: str, awaits: bool) -> str:
    """Definition, in one line, of a reward that calls ``code``, a reward for ``trainer``."""
    names = _argument_names(trainer, signature)
    if trainer == "verl":
        sources = {name: _PER_SAMPLE.get(name, f"sample.metadata[{name!r}]") for name in names}
        parameter = "sample"
    else:
        items = {name: _PER_GROUP.get(name, f"s.metadata[{name!r}]") for name in names}
        sources = {name: f"[{item} for s in samples]" for name, item in items.items()}
        parameter = "samples"
    arguments = ", ".join(f"{name}={source}" for name, source in sources.items())
    start, call = ("async def", f"await {code}") if awaits else ("def", code)
    return f"{start} score({parameter}): return {call}({arguments})"


def _argument_names(trainer: str, signature: inspect.Signature) -> list[str]:
    """Parameters to pass to a reward for ``trainer``: those without a default, and those whose
    values are known here."""
    sources = _PER_SAMPLE if trainer == "verl" else _PER_GROUP
    names = list[str]()
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            names += [name for name in _ALWAYS.get(trainer, ()) if name not in names]
        elif parameter.kind is parameter.VAR_POSITIONAL:
            continue
        elif parameter.name in sources or parameter.default is parameter.empty:
            names.append(parameter.name)
    return names
