"""The sum of a step's gradients over the ranks that have the same weights, in megatron-core's
buffers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from relax_hpc.training.gradients import average_repeated_gradients


class Reduction:
    """Sum of gradients after the last backward pass of a step, all at once."""

    def __init__(self, module: Any) -> None:
        """``module``: megatron-core's DistributedDataParallel."""
        self.module = module

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        """Context around forward and backward passes; ``last``: no others follow in the step.
        RuntimeError: some do."""
        yield

    def finish(self) -> None:
        """Make main gradients the sums over all ranks. Collective over these."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.module])
        average_repeated_gradients(self.module)

    def drop(self) -> None:
        """Forget the step. Collective over all ranks."""


class OverlappedReduction(Reduction):
    """Sum of each bucket's gradients as soon as the last backward pass is done with its parameters,
    while it goes on.

    megatron-core begins with whichever bucket is ready, and takes the last pass of a call for the
    last of the step. Here buckets begin in one order, the same in all ranks, whatever a rank is
    done with first: two that began different ones would wait for each other, or add what does not
    belong together. In the first step they begin after the pass, as megatron-core counts in it how
    often each parameter has a gradient.
    """

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        place = {parameter: number for number, parameter in enumerate(module.parameters())}
        groups = [*module.bucket_groups, *module.expert_parallel_bucket_groups]
        # As the backward pass is done with them: a bucket with the parameter of it that came first
        # in the forward pass.
        groups.sort(key=lambda group: -min(place[parameter] for parameter in group.params))
        self._begins = [group.start_grad_sync for group in groups]
        for number, group in enumerate(groups):
            group.start_grad_sync = partial(self._is_ready, number)
        self._forget()

    @contextmanager
    def passes(self, last: bool) -> Iterator[None]:
        """See `Reduction`. At its end the sums of all buckets have begun, if it was the
        ``last``."""
        if self._begun:
            raise RuntimeError(
                "gradients: passes after the last of a step, whose sums over ranks have begun"
            )
        if not last:
            with self.module.no_sync():
                yield
            return
        # By this the schedules of megatron-core tell the last micro-batch from the others.
        self.module.config.no_sync_func = self.module.no_sync
        try:
            yield
        finally:
            self.module.config.no_sync_func = None
        self._begin_up_to(len(self._begins))

    def finish(self) -> None:
        """See `Reduction`; passes none of which was said to be the last are summed now."""
        self._begin_up_to(len(self._begins))
        super().finish()
        self._forget()

    def drop(self) -> None:
        """See `Reduction`. What has begun is waited for: it writes into the buffers."""
        if self._begun:
            self.module.finish_grad_sync()
        self._forget()

    def _is_ready(self, number: int, force_all_reduce: bool = False) -> None:
        self._ready.add(number)
        ready = self._begun
        while ready in self._ready:
            ready += 1
        self._begin_up_to(ready)

    def _begin_up_to(self, stop: int) -> None:
        while self._begun < stop:
            self._begun += 1
            self._begins[self._begun - 1]()

    def _forget(self) -> None:
        self._begun = 0
        """Number of buckets whose sums have begun, in their order."""
        self._ready: set[int] = set()


def make_reduction(module: Any) -> Reduction:
    """Make the reduction of ``module`` that its configuration says."""
    return (
        OverlappedReduction(module) if module.ddp_config.overlap_grad_reduce else Reduction(module)
    )
