"""Stages of the start of a process or an engine, sorted by what a start spends its time on.

A process records its stages with its spans (`Spans.enter_stage`): the phases that `status` shows.
"""

from __future__ import annotations

import re

PROCESS, IMPORTS, WEIGHTS, COMPILATION, OTHER = (
    "process",
    "imports",
    "weights",
    "compilation",
    "other",
)
_SORTS = (
    (re.compile(r"import"), IMPORTS),
    (re.compile(r"loading (?:the model|weights|checkpoint)"), WEIGHTS),
    (re.compile(r"tuning kernels|capturing CUDA graphs|warming|compil"), COMPILATION),
    (
        re.compile(r"starting the process|SGLang is starting|connecting its ranks|about to serve"),
        PROCESS,
    ),
)
"""Patterns of stages, the first match counts."""


def sort_stage(stage: str) -> str:
    """Kind of work on which a start spends the time of ``stage``.

    >>> sort_stage("SGLang is loading weights"), sort_stage("reading prompts")
    ('weights', 'other')
    """
    return next((sort for pattern, sort in _SORTS if pattern.search(stage)), OTHER)
