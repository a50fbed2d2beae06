"""What tools/gpu/check.sh measures, and the table that is made of it, which docs/benchmarks/gpu.md
shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Figures = Mapping[str, Any]
"""Of a job, by name; or its `error`."""
ADAM_BYTES = 34
"""Of a parameter, that a step cannot do without: its float32 main parameter and two moments read
and written, its gradient read for the norm and for the step, and bfloat16 written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process, `tools/gpu/PROGRAM.py`."""

    program: str
    about: Mapping[str, Any]
    small: Mapping[str, Any]
    """What is otherwise on tiny shapes."""
    needs: tuple[str, ...] = ()
    """Modules without which it is not measured."""
    gpus: int = 1
    ours: bool = True
    """That it fails is a failure of this code."""
    limit_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the table: a figure, made of those of ``jobs``."""

    what: str
    jobs: tuple[str, ...]
    value: Callable[..., float]
    unit: str = ""
    least: float | None = None
    most: float | None = None

    @property
    def target(self) -> str:
        """In words; empty: there is none.

        >>> Row("MFU", (), float, least=0.45).target, Row("memory", (), float, "GiB",
        ...     most=40).target
        ('>= 0.45', '<= 40 GiB')
        """
        bounds = ((">=", self.least), ("<=", self.most))
        said = " and ".join(f"{sign} {bound:g}" for sign, bound in bounds if bound is not None)
        return f"{said} {self.unit}".strip() if said else ""

    def cells(self, found: Mapping[str, Figures], judged: bool = True) -> list[str]:
        """The figure, or why there is none, and the target, with whether it is met if ``judged``.
        ``found``: by job.

        >>> row = Row("host, of kernels", ("step",), lambda step: step["host"] / step["kernels"],
        ...     "x", most=1.0)
        >>> row.cells({"step": {"host": 1.0, "kernels": 2.0}})
        ['host, of kernels', '0.5 x', '<= 1 x: met']
        >>> row.cells({"step": {"error": "out of memory"}}), row.cells({})
        (['host, of kernels', 'out of memory', '<= 1 x'], ['host, of kernels', 'not measured', '<= 1
        x'])
        """
        for job in self.jobs:
            if job not in found or "error" in found[job]:
                return [
                    self.what,
                    str(found.get(job, {}).get("error", "not measured")),
                    self.target,
                ]
        try:
            value = self.value(*(found[job] for job in self.jobs))
        except KeyError:
            return [self.what, "not measured: needs a GPU", self.target]
        met = (self.least is None or value >= self.least) and (
            self.most is None or value <= self.most
        )
        verdict = f": {'met' if met else 'missed'}" if self.target and judged else ""
        return [self.what, f"{value:.3g} {self.unit}".strip(), self.target + verdict]


# -- what is measured ------------------------------------------------------------------------------

PEERS = {
    "transformers": {},
    "transformers, fp32 masters": {"masters": True},
    "transformers + Liger": {"liger": True},
    "transformers + Liger, fp32 masters": {"liger": True, "masters": True},
}
OURS: Mapping[str, dict[str, Any]] = {
    "plain": {"kernels": "plain"},
    "fused": {"kernels": "fused"},
    "fused, recomputed": {"kernels": "fused", "recompute": "full"},
}
LARGE = {"kernels": "fused", "recompute": "full", "optimizer": {"offload": True}}
CASES: Mapping[str, dict[str, Any]] = {
    "0.6B, 8 x 2,048": {"shape": "0.6B", "count": 8, "length": 2048, "micro": 16384},
    "1.7B, 8 x 2,048": {"shape": "1.7B", "count": 8, "length": 2048, "micro": 8192},
    "0.6B, 1 x 16,384": {"shape": "0.6B", "count": 1, "length": 16384, "micro": 16384},
}
SMALL_MICRO = {"shape": "0.6B", "count": 8, "length": 2048, "micro": 8192}
MODES = ("colocate", "0", "1")
OVERLAPPED: Mapping[str, dict[str, Any]] = {
    "whole optimizer": {},
    "distributed optimizer": {"distributed": True},
}
COPIED = {"shape": "0.6B", "actor": {"kernels": "fused"}}
COPIED_SMALL = {"shape": "tiny"}


def _step(about: Mapping[str, Any], limit_s: float = 300.0) -> Job:
    fused = about.get("actor", {}).get("kernels") == "fused"
    needs = (
        ["transformers"] * (about.get("who") == "peer")
        + ["liger_kernel"] * ("liger" in about)
        + ["triton"] * fused
    )
    count = min(about["count"], 4)
    small = {
        "shape": "tiny",
        "count": count,
        "length": 64 if count > 1 else 256,
        "micro": 128,
        "steps": 2,
    }
    ours = about.get("who") != "peer"
    return Job(
        program="step", about=about, small=small, needs=tuple(needs), ours=ours, limit_s=limit_s
    )


def _jobs() -> Iterator[tuple[str, Job]]:
    sizes = (
        {"size": 8192, "copied_bytes": 1 << 30},
        {"size": 256, "copied_bytes": 1 << 20, "rounds": 3},
    )
    yield "rates", Job(program="rates", about=sizes[0], small=sizes[1])
    for case, about in CASES.items():
        for name in ("fused", "fused, recomputed" if about["count"] == 1 else "plain"):
            yield f"{case}: {name}", _step(about | {"actor": OURS[name]})
        for name, peer in PEERS.items():
            yield f"{case}: {name}", _step(about | {"who": "peer"} | peer)
    for name in ("plain", "fused"):
        yield f"0.6B, micro-batches of 8,192: {name}", _step(SMALL_MICRO | {"actor": OURS[name]})
    long = {"shape": "8B", "count": 8, "length": 16384, "micro": 16384, "actor": LARGE, "steps": 2}
    yield "8B, 8 x 16,384: offloaded", _step(long, 600.0)
    yield "8B, 8 x 16,384: without optimizer", _step(long | {"who": "alone"}, 600.0)
    longest = long | {"count": 1, "length": 32768, "micro": 32768}
    yield "8B, 1 x 32,768: without optimizer", _step(longest | {"who": "alone"}, 600.0)
    for name in ("plain", "fused"):
        lengths = {"rows": 64, "median": 700, "longest": 8192, "budget": 16384}
        tiny = {
            "shape": "tiny",
            "rows": 12,
            "median": 40,
            "longest": 200,
            "budget": 256,
            "rounds": 2,
        }
        about, needs = (
            {"shape": "0.6B", "actor": OURS[name], **lengths},
            ("triton",) * (name == "fused"),
        )
        yield (
            f"0.6B, lognormal: {name}",
            Job(program="packing", about=about, small=tiny, needs=needs),
        )
    step, step_small = {"count": 8, "length": 1024}, {"count": 2, "length": 32}
    for name, optimizer in OVERLAPPED.items():
        about = {
            "shape": "0.6B",
            "count": 8,
            "length": 2048,
            "micro": 16384,
            "ranks": 2,
            "limit_s": 240.0,
        }
        tiny = {"shape": "tiny", "count": 2, "length": 64, "micro": 128, "steps": 2}
        about |= {"actor": {"kernels": "fused", "optimizer": optimizer}}
        yield (
            f"0.6B, 2 GPUs: {name}",
            Job(program="overlap", about=about, small=tiny, needs=("triton",), gpus=2),
        )
    of = {"slab": {**step, "rounds": 7}, "readers": {"rounds": 7}, "checkpoint": step}
    small = {
        "slab": {**step_small, "rounds": 3},
        "readers": {"rounds": 3},
        "checkpoint": step_small,
    }
    for what, about in of.items():
        about, tiny = COPIED | {"what": what} | about, COPIED_SMALL | small[what]
        yield what, Job(program="copies", about=about, small=tiny, needs=("triton",), limit_s=600.0)
    for mode in MODES:
        about = {"mode": mode, "shape": "0.6B", "steps": 20, "prompts": 16, "new_tokens": 512}
        about |= {"kv_tokens": 262144, "share": 0.4}
        tiny = {
            "shape": "tiny",
            "steps": 5,
            "prompts": 2,
            "new_tokens": 8,
            "kv_tokens": 4096,
            "share": 0.1,
        }
        needs = ("sglang", "transformers", "mpi4py")
        yield (
            f"mode {mode}",
            Job(program="staleness", about=about, small=tiny, needs=needs, limit_s=1200.0),
        )


JOBS: Mapping[str, Job] = dict(_jobs())


# -- the table -------------------------------------------------------------------------------------


def _mfu(step: Figures, rates: Figures) -> float:
    return step["flops_of_step"] / rates["matmul_flops"]


def _faster(ours: Figures, peer: Figures) -> float:
    return ours["tokens_per_s"] / peer["tokens_per_s"]


def _of_floor(step: Figures, rates: Figures) -> float:
    return step["optimizer_s"] / (ADAM_BYTES * step["parameters"] / rates["copy"])


def _as_worked_out(what: str, job: str) -> Row:
    name = f"{what}: memory as plan works it out, of it"
    return Row(
        name,
        (job,),
        lambda step: step["worked_out_gib"] / step["memory_gib"],
        "x",
        least=0.9,
        most=1.1,
    )


def _table() -> Iterator[Row]:
    for case, (mfu, faster, than_liger) in {
        "0.6B, 8 x 2,048": (0.45, 1.9, 1.05),
        "1.7B, 8 x 2,048": (0.5, 1.4, 1.05),
    }.items():
        fused = f"{case}: fused"
        yield Row(f"{case} tokens: MFU", (fused, "rates"), _mfu, least=mfu)
        yield Row(f"{case} tokens: MFU of plain kernels", (f"{case}: plain", "rates"), _mfu)
        for peer, least in zip(PEERS, (faster, None, than_liger, None), strict=True):
            yield Row(
                f"{case} tokens: throughput, of {peer}",
                (fused, f"{case}: {peer}"),
                _faster,
                "x",
                least,
            )
        name = "optimizer step, of the floor of its bytes"
        yield Row(f"{case.split(',')[0]}: {name}", (fused, "rates"), _of_floor, "x", most=1.8)
        what = f"{case.split(',')[0]}: comparison of kernels with plain layers at start"
        yield Row(what, (fused,), lambda step: step["compared_s"], "s")
    for name, mfu, memory in (("fused", 0.48, 40.0), ("fused, recomputed", 0.40, 24.0)):
        job, what = (
            f"0.6B, 1 x 16,384: {name}",
            f"0.6B, 1 x 16,384 tokens{name.removeprefix('fused')}",
        )
        yield Row(f"{what}: MFU", (job, "rates"), _mfu, least=mfu)
        yield Row(f"{what}: memory", (job,), lambda step: step["memory_gib"], "GiB", most=memory)
        yield _as_worked_out(what, job)
    for peer in PEERS:
        jobs = ("0.6B, 1 x 16,384: fused", f"0.6B, 1 x 16,384: {peer}")
        yield Row(f"0.6B, 1 x 16,384 tokens: throughput, of {peer}", jobs, _faster, "x")
    for name in ("offloaded", "without optimizer"):
        job, what = f"8B, 8 x 16,384: {name}", f"8B, 8 x 16,384 tokens, recomputed, {name}"
        both = lambda step, rates: step["flops_of_both"] / rates["matmul_flops"]  # noqa: E731
        yield Row(f"{what}: MFU of forward and backward", (job, "rates"), both, least=0.5)
        yield Row(f"{what}: memory", (job,), lambda step: step["memory_gib"], "GiB", most=74.5)
        if name == "offloaded":
            yield _as_worked_out(what, job)
    yield Row(
        "8B: optimizer step, offloaded",
        ("8B, 8 x 16,384: offloaded",),
        lambda step: step["optimizer_s"],
        "s",
    )
    job = "8B, 1 x 32,768: without optimizer"
    yield Row(
        "8B, 1 x 32,768 tokens, recomputed: memory",
        (job,),
        lambda step: step["memory_gib"],
        "GiB",
        most=74.5,
    )
    for name, most in (("fused", 1.0), ("plain", None)):
        job, what = (
            f"0.6B, micro-batches of 8,192: {name}",
            "0.6B, micro-batches of 8,192 tokens: host time, of kernels'",
        )
        host = lambda step: step["host_s"] / step["kernels_s"]  # noqa: E731
        yield Row(what if most else f"{what}, plain kernels", (job,), host, "x", most=most)
    for name, least, most in (("fused", 1.2, 0.01), ("plain", None, None)):
        job, what = (
            f"0.6B, lognormal: {name}",
            f"0.6B, lognormal lengths{'' if least else ', plain kernels'}",
        )
        yield Row(
            f"{what}: tokens a second, packed against padded",
            (job,),
            lambda one: one["of_padded"],
            "x",
            least,
        )
        yield Row(f"{what}: padding of packs", (job,), lambda one: one["padding"], most=most)
    for name in OVERLAPPED:
        what = (
            f"0.6B, 8 x 2,048 tokens on each of 2 GPUs, {name}: step with gradients overlapped, "
            "of one without"
        )
        yield Row(
            what, (f"0.6B, 2 GPUs: {name}",), lambda one: one["beside_of_after"], "x", most=1.0
        )
    yield Row(
        "device to slab, of the raw pinned copy",
        ("slab",),
        lambda one: one["of_raw"],
        "x",
        least=0.95,
    )
    yield Row("a step beside it takes longer by", ("slab",), lambda one: one["slowed"], most=0.01)
    for name in ("actor_fwd", "engine"):
        what = f"slab to {name}'s GPU, of the raw pinned copy"
        yield Row(what, ("readers",), lambda one, name=name: one[f"{name}_of_raw"], "x", least=0.5)
    first = lambda one: one["first_of_raw"]  # noqa: E731
    yield Row(
        "first checkpoint keeps the trainer, of one raw copy of the state",
        ("checkpoint",),
        first,
        "x",
        most=1.5,
    )
    for mode in MODES[1:]:
        jobs, what = (
            (f"mode {mode}", f"mode {MODES[0]}"),
            f"a step at staleness {mode}, of one colocated",
        )
        yield Row(what, jobs, lambda one, base: one["step_s"] / base["step_s"], "x")
    for mode in MODES:
        what = (
            f"{'colocated' if mode == MODES[0] else f'staleness {mode}'}: least possible step, "
            "of the step"
        )
        yield Row(what, (f"mode {mode}",), lambda one: one["ideal_share"])


ROWS: tuple[Row, ...] = tuple(_table())
COLUMNS = ("what", "measured", "target")
