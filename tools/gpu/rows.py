"""The rows of the table of GPU figures: each is a figure that is made of the figures of jobs.
docs/benchmarks/gpu.md shows the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from jobs import COMPONENTS, OVERLAPPED, PEERS

Figures = Mapping[str, Any]
"""Figures of a job by name, or its `error`."""
ADAM_BYTES = 34
"""Bytes per parameter that an optimizer step cannot avoid: the float32 main parameter and two
moments are read and written, the gradient is read for the norm and for the step, and the bfloat16
parameter is written."""


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a figure that is calculated from the figures of ``jobs``."""

    label: str
    jobs: tuple[str, ...]
    value: Callable[..., float]
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def target(self) -> str:
        """The target as text; empty without a target.

        >>> Row("MFU", (), float, least=0.45).target
        '>= 0.45'
        >>> Row("memory", (), float, "GiB", most=40).target
        '<= 40 GiB'
        """
        bounds = []
        if self.least is not None:
            bounds.append(f">= {self.least:g}")
        if self.most is not None:
            bounds.append(f"<= {self.most:g}")
        return f"{' and '.join(bounds)} {self.unit}".strip() if bounds else ""

    def cells(self, measured: Mapping[str, Figures], judge: bool = True) -> list[str]:
        """The label; the figure, or the reason why it is missing; and the target, with ``judge``
        also whether the figure meets it. ``measured``: figures by job.

        >>> row = Row("host, of kernels", ("step",), lambda step: step["host"] / step["kernels"],
        ...     "x", most=1.0)
        >>> row.cells({"step": {"host": 1.0, "kernels": 2.0}})
        ['host, of kernels', '0.5 x', '<= 1 x: met']
        >>> row.cells({"step": {"error": "out of memory"}})
        ['host, of kernels', 'out of memory', '<= 1 x']
        >>> row.cells({})
        ['host, of kernels', 'not measured', '<= 1 x']
        """
        figures = [measured.get(job, {}) for job in self.jobs]
        try:
            value = self.value(*figures)
        except KeyError:
            return [self.label, _reason(figures), self.target]
        verdict = ""
        if self.target and judge:
            verdict = ": met" if self._meets_target(value) else ": missed"
        return [self.label, f"{value:.3g} {self.unit}".strip(), self.target + verdict]

    def _meets_target(self, value: float) -> bool:
        enough = self.least is None or value >= self.least
        return enough and (self.most is None or value <= self.most)


def _reason(figures: Sequence[Figures]) -> str:
    """Why no figure can be calculated from ``figures`` of jobs."""
    for of_job in figures:
        if "error" in of_job:
            return str(of_job["error"])
        if not of_job:
            return "not measured"
    return "not measured: needs a GPU"


def _figure(name: str) -> Callable[[Figures], float]:
    """The figure ``name`` of a single job."""
    return lambda figures: float(figures[name])


def _mfu(step: Figures, rates: Figures) -> float:
    """Share of the matrix product's rate that a whole step reaches."""
    return float(step["flops_of_step"] / rates["matmul_flops"])


def _mfu_of_passes(step: Figures, rates: Figures) -> float:
    """Share of the matrix product's rate that forward and backward pass reach."""
    return float(step["flops_of_both"] / rates["matmul_flops"])


def _speed_ratio(ours: Figures, peer: Figures) -> float:
    return float(ours["tokens_per_s"] / peer["tokens_per_s"])


def _of_floor(step: Figures, rates: Figures) -> float:
    """Seconds of the optimizer's step relative to those of a copy of as many bytes."""
    return float(step["optimizer_s"] / (ADAM_BYTES * step["parameters"] / rates["copy"]))


def _planned_memory(label: str, job: str) -> Row:
    return Row(
        f"{label}: memory as plan works it out, of it",
        (job,),
        lambda step: step["worked_out_gib"] / step["memory_gib"],
        "x",
        least=0.9,
        most=1.1,
    )


def _short_rows(case: str, mfu: float, faster: float, than_liger: float) -> Iterator[Row]:
    """Steps of 8 rows of 2,048 tokens, and their peers."""
    fused = f"{case}: fused"
    size = case.split(",", maxsplit=1)[0]
    yield Row(f"{case} tokens: MFU", (fused, "rates"), _mfu, least=mfu)
    yield Row(f"{case} tokens: MFU of plain kernels", (f"{case}: plain", "rates"), _mfu)
    targets = {"transformers": faster, "transformers + Liger": than_liger}
    for peer in PEERS:
        label = f"{case} tokens: throughput, of {peer}"
        yield Row(label, (fused, f"{case}: {peer}"), _speed_ratio, "x", targets.get(peer))
    label = f"{size}: optimizer step, of the floor of its bytes"
    yield Row(label, (fused, "rates"), _of_floor, "x", most=1.8)
    label = f"{size}: comparison of kernels with plain layers at start"
    yield Row(label, (fused,), _figure("compared_s"), "s")


def _long_row() -> Iterator[Row]:
    """Steps of one row of 16,384 tokens, and their peers."""
    case = "0.6B, 1 x 16,384"
    for kind, mfu, memory in (("fused", 0.48, 40.0), ("fused, recomputed", 0.40, 24.0)):
        job = f"{case}: {kind}"
        label = f"{case} tokens{kind.removeprefix('fused')}"
        yield Row(f"{label}: MFU", (job, "rates"), _mfu, least=mfu)
        yield Row(f"{label}: memory", (job,), _figure("memory_gib"), "GiB", most=memory)
        yield _planned_memory(label, job)
    for peer in PEERS:
        jobs = (f"{case}: fused", f"{case}: {peer}")
        yield Row(f"{case} tokens: throughput, of {peer}", jobs, _speed_ratio, "x")


def _large_model() -> Iterator[Row]:
    """Steps of 8 billion parameters."""
    gib = _figure("memory_gib")
    for kind in ("offloaded", "without optimizer"):
        job = f"8B, 8 x 16,384: {kind}"
        label = f"8B, 8 x 16,384 tokens, recomputed, {kind}"
        mfu = f"{label}: MFU of forward and backward"
        yield Row(mfu, (job, "rates"), _mfu_of_passes, least=0.5)
        yield Row(f"{label}: memory", (job,), gib, "GiB", most=74.5)
        if kind == "offloaded":
            yield _planned_memory(label, job)
    label = "8B: optimizer step, offloaded"
    yield Row(label, ("8B, 8 x 16,384: offloaded",), _figure("optimizer_s"), "s")
    label = "8B, 1 x 32,768 tokens, recomputed: memory"
    yield Row(label, ("8B, 1 x 32,768: without optimizer",), gib, "GiB", most=74.5)


def _small_micro_batches() -> Iterator[Row]:
    for kind, highest in (("fused", 1.0), ("plain", None)):
        label = "0.6B, micro-batches of 8,192 tokens: host time, of kernels'"
        if kind == "plain":
            label += ", plain kernels"
        job = f"0.6B, micro-batches of 8,192: {kind}"
        yield Row(label, (job,), lambda step: step["host_s"] / step["kernels_s"], "x", most=highest)


def _packed_rows() -> Iterator[Row]:
    for kind, lowest, highest in (("fused", 1.2, 0.01), ("plain", None, None)):
        label = "0.6B, lognormal lengths" + (", plain kernels" if kind == "plain" else "")
        job = f"0.6B, lognormal: {kind}"
        name = f"{label}: tokens a second, packed against padded"
        yield Row(name, (job,), _figure("of_padded"), "x", lowest)
        yield Row(f"{label}: padding of packs", (job,), _figure("padding"), most=highest)


def _overlapped_gradients() -> Iterator[Row]:
    for name in OVERLAPPED:
        label = (
            f"0.6B, 8 x 2,048 tokens on each of 2 GPUs, {name}: step with gradients overlapped, "
            "of one without"
        )
        job = f"0.6B, 2 GPUs: {name}"
        yield Row(label, (job,), _figure("beside_of_after"), "x", most=1.0)


def _copies() -> Iterator[Row]:
    """Copies of weights and checkpoints between the device and the host."""
    label = "device to slab, of the raw pinned copy"
    yield Row(label, ("slab",), _figure("of_raw"), "x", least=0.95)
    yield Row("a step during the copy takes longer by", ("slab",), _figure("slowed"), most=0.01)
    for reader in ("actor_fwd", "engine"):
        label = f"slab to {reader}'s GPU, of the raw pinned copy"
        yield Row(label, ("readers",), _figure(f"{reader}_of_raw"), "x", least=0.5)
    label = "first checkpoint keeps the trainer, of one raw copy of the state"
    yield Row(label, ("checkpoint",), _figure("first_of_raw"), "x", most=1.5)


def _whole_runs() -> Iterator[Row]:
    for mode in ("0", "1"):
        label = f"a step at staleness {mode}, of one colocated"
        jobs = (f"mode {mode}", "mode colocate")
        yield Row(label, jobs, lambda run, colocated: run["step_s"] / colocated["step_s"], "x")
    for mode in ("colocate", "0", "1"):
        name = "colocated" if mode == "colocate" else f"staleness {mode}"
        label = f"{name}: least possible step, of the step"
        yield Row(label, (f"mode {mode}",), _figure("ideal_share"))


def _components() -> Iterator[Row]:
    """Deviations of kernels and attention from exact results, and their speed."""
    for job in COMPONENTS:
        yield Row(f"{job}: cases that failed", (job,), _figure("failed"), most=0)
    deviation = "largest deviation from float64"
    limits = {"logprobs": 0.004, "norm": 0.004, "swiglu": 0.004, "rotary": 0.004, "adam": 0.0079}
    for kernel, limit in limits.items():
        job = f"kernels: {kernel}"
        yield Row(f"{job}: {deviation}", (job,), _largest(" deviation"), most=limit)
        label = f"{job}: bandwidth, of a copy on the device"
        yield Row(label, (job,), _smallest(" of_copy"), "x", least=0.7)
    label = "attention of packed rows: largest deviation from float32"
    yield Row(label, ("attention: deviations",), _largest(" deviation"), most=0.02)
    for batch in ("1 x 16384", "8 x 2048", "16 x 1024"):
        for direction in ("forward", "backward"):
            label = f"attention of packed rows, {batch} tokens, {direction}: of the product's rate"
            figure = partial(_attention_share, batch, f"{direction} tflops")
            yield Row(label, ("attention: speed", "rates"), figure)
    for method in ("packed", "by row"):
        label = f"attention {method}: first pass of a row of a new length, of the second"
        figure = _ratio(f"new lengths {method} first_s", f"new lengths {method} second_s")
        yield Row(label, ("attention: speed",), figure, "x")


def _experts() -> Iterator[Row]:
    yield Row("experts: cases that failed", ("experts",), _figure("failed"), most=0)
    for width in (48, 40, 768):
        label = f"grouped experts of width {width}, bfloat16: gradients' error, of float32"
        figure = _figure(f"width {width} grouped gradient_error")
        yield Row(label, ("experts",), figure, most=0.03)
    label = "4 layers of 30B-A3B, 8 x 2,048 tokens: speed of grouped experts, of single ones"
    figure = _ratio("layers single pass_s", "layers grouped pass_s")
    yield Row(label, ("experts",), figure, "x", least=1.5)
    for kind in ("grouped", "single"):
        label = f"4 layers of 30B-A3B, {kind} experts: memory"
        yield Row(label, ("experts",), _figure(f"layers {kind} memory_gib"), "GiB", most=40)


def _towers() -> Iterator[Row]:
    names = {"images": "4 images", "short video": "32 frames", "long video": "128 frames"}
    for job in ("towers", "towers, packed"):
        tower = "vision tower" if job == "towers" else "vision tower with packed attention"
        label = f"{tower}, bfloat16: gradients' error, of float32"
        yield Row(label, (job,), _figure("compared gradient_error"), most=0.05)
        for name, media in names.items():
            label = f"{tower} of Qwen3-VL, {media}"
            seconds = f"{label}: forward and backward"
            yield Row(seconds, (job,), _figure(f"{name} pass_s"), "s")
            figure = _ratio(f"{name} host_s", f"{name} kernels_s")
            yield Row(f"{label}: host time, of kernels'", (job,), figure, "x", most=1.0)


def _colocation() -> Iterator[Row]:
    for job in ("colocate memory", "colocate memory, expandable"):
        label = "colocated, 1.7B" + job.removeprefix("colocate memory")
        share = f"{label}: memory given back to the engine, of the trainer's state"
        yield Row(share, (job,), _figure("given_back_of_state"), least=0.95)
        yield Row(f"{label}: seconds to leave", (job,), _figure("turn_3_leave_s"), "s")
        yield Row(f"{label}: seconds to return", (job,), _figure("turn_3_return_s"), "s")


def _waits() -> Iterator[Row]:
    label = "forward and backward: waits of the host for the device"
    yield Row(label, ("waits",), _figure("waits_in_accumulate"), most=0)
    label = "optimizer step: waits of the host for the device"
    yield Row(label, ("waits",), _figure("waits_in_step"), most=2)
    label = "packs of new lengths: kernels compiled again"
    yield Row(label, ("waits",), _figure("compiled_in_new_lengths"), most=0)


def _ratio(numerator: str, denominator: str) -> Callable[[Figures], float]:
    """The ratio of two figures of a single job."""
    return lambda figures: float(figures[numerator] / figures[denominator])


def _attention_share(batch: str, figure: str, speed: Figures, rates: Figures) -> float:
    return float(speed[f"{batch} packed {figure}"] * 1e12 / rates["matmul_flops"])


def _largest(suffix: str) -> Callable[[Figures], float]:
    """The largest of the figures whose names end with ``suffix``."""
    return lambda figures: max(_ending_with(suffix, figures))


def _smallest(suffix: str) -> Callable[[Figures], float]:
    """The smallest of the figures whose names end with ``suffix``."""
    return lambda figures: min(_ending_with(suffix, figures))


def _ending_with(suffix: str, figures: Figures) -> list[float]:
    """Figures whose names end with ``suffix``. KeyError: there are none."""
    values = [float(value) for name, value in figures.items() if name.endswith(suffix)]
    if not values:
        raise KeyError(suffix)
    return values


def _table() -> Iterator[Row]:
    yield from _components()
    yield from _experts()
    yield from _waits()
    yield from _towers()
    yield from _colocation()
    yield from _short_rows("0.6B, 8 x 2,048", 0.45, 1.9, 1.05)
    yield from _short_rows("1.7B, 8 x 2,048", 0.5, 1.4, 1.05)
    yield from _long_row()
    yield from _large_model()
    yield from _small_micro_batches()
    yield from _packed_rows()
    yield from _overlapped_gradients()
    yield from _copies()
    yield from _whole_runs()


ROWS: tuple[Row, ...] = tuple(_table())
COLUMNS = ("what", "measured", "target")
