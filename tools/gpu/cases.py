"""Many cases in one process. If a case fails, the figures of the other cases remain.

A case adds its figures to a mapping, its argument. They are reported under the case's name, with
the text `NAME error` if it failed. `passed` and `failed` count the cases.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from child import middle, note, sync, timed
from torch import Tensor

Case = Callable[[dict[str, float]], object]
"""Function that measures a case and adds its figures to its argument."""
_ERROR_CHARACTERS = 300
_WARM_UP, _ROUNDS = 3, 20
_FILLED_BYTES, _FILLS = 2**30, 8


class Cases:
    """Figures of all cases so far; see the module."""

    def __init__(self, device: str) -> None:
        """``device``: cuda or cpu."""
        self.device = device
        self.figures: dict[str, Any] = {"passed": 0.0, "failed": 0.0}

    def run(self, name: str, case: Case) -> None:
        """Measure ``case``, and report all figures so far.

        If the device does not work any more, the case is skipped.
        """
        if "device error" in self.figures:
            return
        figures: dict[str, float] = {}
        error_text = ""
        try:
            case(figures)
            sync(self.device)
        except Exception as error:
            error_text = describe(error)
        # The figures that a failed case had before its error are kept.
        self.figures |= {f"{name} {figure}": value for figure, value in figures.items()}
        if error_text:
            self.figures[f"{name} error"] = error_text
        self.figures["failed" if error_text else "passed"] += 1
        self._free_memory()
        note(self.figures)

    def _free_memory(self) -> None:
        # After some errors, such as an illegal address, every later call of CUDA fails too.
        try:
            sync(self.device)
            gc.collect()
            if self.device == "cuda":
                torch.cuda.empty_cache()
        except Exception as error:
            self.figures["device error"] = f"later cases were skipped: {describe(error)}"


def describe(error: Exception) -> str:
    """Type and message of ``error`` in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_ERROR_CHARACTERS]


class DeviceTimer:
    """Measures milliseconds of device work with events of the device."""

    def __init__(self, device: str) -> None:
        self.device = device
        size = _FILLED_BYTES if device == "cuda" else 0
        self._filled = torch.empty(size, dtype=torch.uint8, device=device)

    def median_ms(self, act: Callable[[], object]) -> float:
        """Median of several calls after a warm-up. On a CPU, wall time of one call."""
        if self.device != "cuda":
            return 1e3 * timed(act, self.device)
        for _ in range(_WARM_UP):
            act()
        events = []
        for _ in range(_ROUNDS):
            # The fills replace the contents of the device's cache. They take about 3 ms on an H100.
            # Meanwhile the host launches the kernels of `act`, so launches are not measured.
            for _ in range(_FILLS):
                self._filled.zero_()
            start = torch.cuda.Event(enable_timing=True)
            end = torch.cuda.Event(enable_timing=True)
            start.record()
            act()
            end.record()
            events.append((start, end))
        torch.cuda.synchronize()
        return middle([start.elapsed_time(end) for start, end in events])


def largest_deviation(values: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    """Largest relative deviation of an element of ``values`` from its float64 value in ``exact``.

    |value - exact| / (|exact| + mean |exact|), with the mean over the last dimension. Because of
    the mean, an element near zero does not count more than its neighbours. Rounding to bfloat16
    causes at most 2^-9 = 0.002. NaN if a value is NaN.
    """
    largest = []
    for tensor, exact_tensor in zip(values, exact, strict=True):
        exact_values = exact_tensor.detach()
        sizes = exact_values.abs()
        sizes += sizes.mean(-1, keepdim=True)
        distances = (tensor.detach().double() - exact_values).abs_()
        largest.append(distances.div_(sizes).max())
    return float(torch.stack(largest).max())
