"""Sums of gradients over ranks begin in one order, whatever a rank is done with first.

That they are the same sums: `tests.training.overlap_checks`, in two and four ranks.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.training.reduction import OverlappedReduction


class Bucket:
    """Of megatron-core, as far as it is needed."""

    def __init__(self, number: int, begun: list[int]) -> None:
        self.params, self.number, self.begun = {torch.nn.Parameter(torch.zeros(1))}, number, begun

    def start_grad_sync(self) -> None:
        self.begun.append(self.number)


class Wrapped:
    """A module whose parameters are of so many buckets, those of experts last in their lists and
    early in the model."""

    def __init__(self, buckets: int, expert_buckets: int) -> None:
        self.begun: list[int] = []
        made = [Bucket(number, self.begun) for number in range(buckets)]
        self.in_order = made
        self.bucket_groups, self.expert_parallel_bucket_groups = (
            made[expert_buckets:],
            made[:expert_buckets],
        )
        self.config, self.passes, self.finished = SimpleNamespace(no_sync_func=None), [], 0

    def parameters(self) -> list[torch.nn.Parameter]:
        return [one for bucket in reversed(self.in_order) for one in bucket.params]

    @contextmanager
    def no_sync(self):
        self.passes.append("others follow")
        yield

    def finish_grad_sync(self) -> None:
        self.finished += 1


@given(ready=st.permutations(range(6)), expert_buckets=st.integers(0, 3), missing=st.integers(0, 6))
def test_buckets_begin_in_one_order(ready: list[int], expert_buckets: int, missing: int) -> None:
    module = Wrapped(6, expert_buckets)
    reduction, done = OverlappedReduction(module), set[int]()
    for _ in range(2):
        with reduction.passes(last=True):
            assert module.config.no_sync_func == module.no_sync
            for number in ready[missing:]:
                module.in_order[number].start_grad_sync()
                done.add(number)
                assert module.begun == list(range(len(module.begun))) and done >= {*module.begun}
        assert module.begun == list(range(6)), "those of which a rank has no gradient too"
        reduction.discard()
        module.begun.clear()
        done.clear()
    assert module.finished == 2 and module.passes == [] and module.config.no_sync_func is None


def test_nothing_begins_before_the_last_passes_and_nothing_follows_them() -> None:
    module = Wrapped(2, 0)
    reduction = OverlappedReduction(module)
    with reduction.passes(last=False):
        assert module.passes == ["others follow"] and module.config.no_sync_func is None
    assert module.begun == []
    reduction.discard()
    assert module.finished == 0, "there is nothing to wait for"
    with reduction.passes(last=True):
        pass
    with (
        pytest.raises(RuntimeError, match="after the last of a step"),
        reduction.passes(last=False),
    ):
        pass
