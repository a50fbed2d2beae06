"""Traces of training steps and forward passes by torch's profiler, see `profile.steps`."""

from __future__ import annotations

import contextlib
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from relax_hpc.base.terminal_text import log_entry
from relax_hpc.config.profiling import ProfilePlan
from relax_hpc.queue.process_context import Context


class StepProfiler:
    """Records the profiled steps of this rank into one file.

    Errors of the profiler and of the disk are printed to the log, and the work continues.
    """

    def __init__(self, context: Context) -> None:
        self._context = context
        self._plan = ProfilePlan(
            context.run, context.config, context.group, context.role, context.world.rank
        )
        self._profile: Any = None
        self._first = self._last = 0
        """First and last step that were recorded."""
        self._range: Any = None
        """Range of the present step in the trace."""

    def reach(self, step: int) -> None:
        """Record the work of ``step``, which begins now, if it is to be profiled."""
        if self._profile is None:
            self._plan.refresh()
        elif step > self._plan.last_step:
            self.close()
        if self._plan.includes(step):
            try:
                self._record(step)
            except RuntimeError as error:
                self._give_up(error)

    def close(self) -> None:
        """Write the file if steps were recorded."""
        if self._profile is None:
            return
        try:
            self._finish()
        except (RuntimeError, OSError) as error:
            self._give_up(error)

    def _record(self, step: int) -> None:
        from torch.profiler import record_function

        if self._profile is None:
            self._profile, self._first = self._make_profile(), step
            self._profile.start()
            # Spans show what the process waits for.
            self._context.spans.annotate = record_function
        if self._range is not None and step == self._last:
            return
        self._leave_range()
        self._last, self._range = step, record_function(f"step {step}")
        self._range.__enter__()

    def _make_profile(self) -> Any:
        from torch.profiler import ProfilerActivity, profile

        activities = [ProfilerActivity.CPU]
        if self._context.config.model.device == "cuda":
            activities.append(ProfilerActivity.CUDA)
        settings = self._plan.settings
        return profile(
            activities=activities, record_shapes=settings.shapes, with_stack=settings.stacks
        )

    def _finish(self) -> None:
        self._leave_range()
        self._context.spans.annotate = nullcontext
        profile, self._profile = self._profile, None
        self._plan.finish()
        profile.stop()
        path = self._path()
        path.parent.mkdir(exist_ok=True)
        # torch 2.13 compresses a file whose name ends in .gz. Readers never see an incomplete one.
        temporary = path.with_name(f".{path.name}")
        try:
            profile.export_chrome_trace(str(temporary))
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        print(log_entry(f"profile of steps {self._first} to {self._last}: {path}"), flush=True)

    def _path(self) -> Path:
        context = self._context
        name = f"{context.role}-rank-{context.world.rank}-steps-{self._first}-{self._last}"
        return context.run.profiles / f"{name}.i{context.incarnation:06d}.trace.json.gz"

    def _leave_range(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None

    def _give_up(self, error: Exception) -> None:
        print(log_entry(f"profile.steps: no trace was written: {error}"), flush=True)
        self._context.spans.annotate = nullcontext
        self._plan.finish()
        profile, self._profile, self._range = self._profile, None, None
        with contextlib.suppress(RuntimeError):
            if profile is not None:
                profile.stop()
