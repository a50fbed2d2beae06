"""An error that says what a collective means whose other ranks are gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from relax_hpc.base.errors import RelaxError

P, R = ParamSpec("P"), TypeVar("R")


class LostRankError(RelaxError):
    """A rank of this group is gone, or more than a collective's deadline behind."""


def with_lost_rank_errors(collective: Callable[P, R]) -> Callable[P, R]:
    """A function that does as ``collective``, with LostRankError for what torch's backends
    raise."""

    @wraps(collective)
    def named(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return collective(*args, **kwargs)
        except RuntimeError as error:
            # gloo's have no class of their own, but the file they come from.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            first = str(error).partition("\n")[0]
            raise LostRankError(
                "a rank of this group is gone, or behind by more than queue.wait_timeout_s and a "
                f"minute; its own log says why, beside this one ({first})"
            ) from error

    return named
