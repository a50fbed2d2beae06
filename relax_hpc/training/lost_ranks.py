"""Error of a collective whose other ranks are gone."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.distributed as dist

from relax_hpc.base.errors import RelaxError

P = ParamSpec("P")
R = TypeVar("R")


class LostRankError(RelaxError):
    """A rank of this group is gone, or later than a collective's deadline."""


def with_lost_rank_errors(collective: Callable[P, R]) -> Callable[P, R]:
    """Decorator that raises LostRankError for the errors of torch's backends in ``collective``."""

    @wraps(collective)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return collective(*args, **kwargs)
        except RuntimeError as error:
            # gloo raises plain RuntimeErrors (torch 2.13). Their messages contain its source file.
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            first_line = str(error).partition("\n")[0]
            raise LostRankError(
                "a rank of this group is gone, or late by more than "
                "liveness.collective_timeout_s; its log, in the same folder, has the reason "
                f"({first_line})"
            ) from error

    return wrapped
