"""Sum of a step's gradients over ranks with the same weights, in megatron-core's buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from relax_hpc.training.gradients import average_repeated_gradients


class Reduction:
    """Sum of all gradients after the last backward pass of a step."""

    def __init__(self, module: Any) -> None:
        """``module``: megatron-core's DistributedDataParallel."""
        self.module = module

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        """Context of forward and backward passes. ``last``: no other passes follow in the step.

        RuntimeError: passes follow the last ones of a step.
        """
        yield

    def finish(self) -> None:
        """Complete the sums over all ranks in the main gradients. Collective over all ranks."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.module])
        average_repeated_gradients(self.module)

    def discard(self) -> None:
        """Discard the step. Collective over all ranks."""


class OverlappedReduction(Reduction):
    """Sum of each bucket's gradients during the last backward pass, as soon as the bucket is
    complete.

    megatron-core 0.16.1 starts the buckets in the order in which they become complete, and treats
    the last pass of a call as the last of the step. Here all ranks start the buckets in the same
    order. Two ranks that started different buckets would wait for each other, or add unrelated
    gradients. In the first step the sums start after the pass, because megatron-core first counts
    how often each parameter gets a gradient.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        numbers = {parameter: number for number, parameter in enumerate(module.parameters())}
        groups = [*module.bucket_groups, *module.expert_parallel_bucket_groups]
        # Order in which the backward pass completes buckets: by the parameter of a bucket that
        # comes first in the forward pass, backwards.
        groups.sort(key=lambda group: -min(numbers[parameter] for parameter in group.params))
        self._starts = [group.start_grad_sync for group in groups]
        # megatron-core's backward hooks call `start_grad_sync` when a bucket is complete. Here the
        # call only marks the bucket as ready.
        for number, group in enumerate(groups):
            group.start_grad_sync = partial(self._mark_ready, number)
        self._reset()

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        """See `Reduction`. At the end of the ``last`` passes, the sums of all buckets have
        started."""
        if self._started:
            raise RuntimeError(
                "gradients: passes after the last of a step, whose sums over ranks have started"
            )
        if not last:
            with self.module.no_sync():
                yield
            return
        # megatron-core's schedules call this function for all micro-batches except the last.
        self.module.config.no_sync_func = self.module.no_sync
        try:
            yield
        finally:
            self.module.config.no_sync_func = None
        self._start_up_to(len(self._starts))

    def finish(self) -> None:
        """See `Reduction`. If no passes were the last, the sums start now."""
        self._start_up_to(len(self._starts))
        super().finish()
        self._reset()

    def discard(self) -> None:
        """See `Reduction`. It waits for sums that have started, because they write into the
        buffers."""
        if self._started:
            self.module.finish_grad_sync()
        self._reset()

    def _mark_ready(self, number: int, force_all_reduce: bool = False) -> None:
        self._ready.add(number)
        ready = self._started
        while ready in self._ready:
            ready += 1
        self._start_up_to(ready)

    def _start_up_to(self, stop: int) -> None:
        while self._started < stop:
            self._started += 1
            self._starts[self._started - 1]()

    def _reset(self) -> None:
        # Number of buckets whose sums have started, in their order.
        self._started = 0
        self._ready: set[int] = set()


def make_reduction(module: Any) -> Reduction:
    """The reduction of ``module`` that its configuration selects."""
    if module.ddp_config.overlap_grad_reduce:
        return OverlappedReduction(module)
    return Reduction(module)
