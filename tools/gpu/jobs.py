"""What tools/gpu/check.sh measures: one process for each job, in order of value.

If the time of a machine is short, the first jobs are the ones that matter most: the rates of the
device, whether each kernel is right and fast, a training step, memory at real sizes, the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

TRAINER_ENVIRONMENT = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""For processes that train. An engine with torch_memory_saver 0.0.10 refuses expandable segments,
so processes that start engines do not get this variable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One process of `tools/gpu/PROGRAM.py`."""

    program: str
    arguments: Mapping[str, Any]
    small: Mapping[str, Any] = field(default_factory=dict)
    """Arguments that replace others on tiny shapes."""
    needs: tuple[str, ...] = ()
    """Modules without which the job is not measured."""
    gpus: int = 1
    ours: bool = True
    """Whether a failure of the job is a failure of this code."""
    expected_s: float = 40.0
    """Seconds that it takes on an H100. With less time left it is not started."""
    limit_s: float = 300.0
    environment: Mapping[str, str] = field(default_factory=dict)


PEERS: Mapping[str, dict[str, Any]] = {
    "transformers": {},
    "transformers + Liger": {"liger": True},
    "transformers, fp32 masters": {"masters": True},
    "transformers + Liger, fp32 masters": {"liger": True, "masters": True},
}
OURS: Mapping[str, dict[str, Any]] = {
    "plain": {"kernels": "plain"},
    "fused": {"kernels": "fused"},
    "fused, recomputed": {"kernels": "fused", "recompute": "full"},
}
SHORT_ROWS = {"count": 8, "length": 2048}
CASES: Mapping[str, dict[str, Any]] = {
    "0.6B, 8 x 2,048": {"shape": "0.6B", **SHORT_ROWS, "micro": 16384},
    "1.7B, 8 x 2,048": {"shape": "1.7B", **SHORT_ROWS, "micro": 8192},
    "0.6B, 1 x 16,384": {"shape": "0.6B", "count": 1, "length": 16384, "micro": 16384},
}
LARGE: dict[str, Any] = {
    "shape": "8B",
    "count": 8,
    "length": 16384,
    "micro": 16384,
    "actor": {"kernels": "fused", "recompute": "full", "optimizer": {"offload": True}},
    "steps": 1,
}
MODES = ("0", "colocate", "1")
OVERLAPPED: Mapping[str, dict[str, Any]] = {
    "whole optimizer": {},
    "distributed optimizer": {"distributed": True},
}
COPY_ROUNDS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "slab": ({"count": 8, "length": 1024, "rounds": 7}, {"count": 2, "length": 32, "rounds": 3}),
    "readers": ({"rounds": 7}, {"rounds": 3}),
    "checkpoint": ({"count": 8, "length": 1024}, {"count": 2, "length": 32}),
}


def _step(arguments: Mapping[str, Any], expected_s: float = 30.0, limit_s: float = 300.0) -> Job:
    """A training step of ours or of a peer."""
    ours = arguments.get("who") != "peer"
    needs = []
    if not ours:
        needs.append("transformers")
    if "liger" in arguments:
        needs.append("liger_kernel")
    if arguments.get("actor", {}).get("kernels") == "fused":
        needs.append("triton")
    count = min(arguments["count"], 4)
    length = 64 if count > 1 else 256
    small = {"shape": "tiny", "count": count, "length": length, "micro": 128, "steps": 2}
    return Job(
        program="step",
        arguments=arguments,
        small=small,
        needs=tuple(needs),
        ours=ours,
        expected_s=expected_s,
        limit_s=limit_s,
        environment=TRAINER_ENVIRONMENT,
    )


def _ours(case: str, kind: str) -> tuple[str, Job]:
    return f"{case}: {kind}", _step(CASES[case] | {"actor": OURS[kind]})


def _peer(case: str, name: str) -> tuple[str, Job]:
    return f"{case}: {name}", _step(CASES[case] | {"who": "peer"} | PEERS[name])


ODD_LENGTHS = [1, 2, 3, 7, 17, 31, 33, 61, 127, 128, 129, 191, 257, 300, 513, 1025, 2047]
# With the remainders of 128 for which cuDNN has other kernels, and with short rows among long ones.
LONG_LENGTHS = [4096, 4097, 4160, 3967, 4033, 1, 65]
COPIED, COPIED_SMALL = {"copied_bytes": 1 << 30}, {"copied_bytes": 1 << 20}
COMPONENTS: Mapping[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "collectives": ({}, {}, 15.0),
    "attention: deviations": (
        {
            "what": "deviations",
            "lengths": ODD_LENGTHS,
            "heads": [[32, 8, 128], [16, 8, 128], [32, 8, 64], [16, 4, 256], [8, 8, 256]],
            "long_lengths": LONG_LENGTHS,
        },
        {"lengths": [1, 2, 7, 33], "heads": [[4, 2, 16]], "long_lengths": [64, 3]},
        20.0,
    ),
    "attention: speed": (
        {
            "what": "speed",
            "batches": [[1, 16384], [8, 2048], [16, 1024]],
            "heads": 32,
            "groups": 8,
            "size": 128,
        },
        {"batches": [[1, 64], [4, 16]], "heads": 4, "groups": 2, "size": 16},
        20.0,
    ),
    "kernels: logprobs": (
        {"what": "logprobs", "vocabularies": [151936, 151669, 262144], "logits": 1 << 28} | COPIED,
        {"vocabularies": [5001], "logits": 20004} | COPIED_SMALL,
        25.0,
    ),
    "kernels: norm": (
        {"what": "norm", "widths": [4096, 128, 1024, 5120, 8192, 12288], "elements": 1 << 26}
        | COPIED,
        {"widths": [48], "elements": 5000} | COPIED_SMALL,
        35.0,
    ),
    "kernels: adam": (
        {"what": "adam", "counts": [1 << 24, (1 << 24) - 2047]} | COPIED,
        {"counts": [5001]} | COPIED_SMALL,
        15.0,
    ),
    "kernels: rotary": (
        {
            "what": "rotary",
            "tokens": 16384,
            "heads": [[32, 128], [8, 128], [40, 128], [32, 64], [16, 256]],
        }
        | COPIED,
        {"tokens": 9, "heads": [[5, 24]]} | COPIED_SMALL,
        15.0,
    ),
    "kernels: swiglu": (
        {"what": "swiglu", "widths": [3072, 12288, 25600], "elements": 1 << 26} | COPIED,
        {"widths": [34], "elements": 5000} | COPIED_SMALL,
        15.0,
    ),
}
"""Parts of a step measured alone: arguments, those on tiny shapes, expected seconds."""


TOWERS: dict[str, Any] = {
    "shape": "Qwen3-VL",
    "compared": [[1, 16, 24], [1, 32, 32], [1, 24, 16], [1, 20, 20], [4, 16, 16]],
    "images": [[1, 16, 24], [1, 32, 32], [1, 24, 16], [1, 20, 20]],
    "short_video": [[16, 28, 28]],
    "long_video": [[64, 16, 16]],
    "new_sizes": [[1, 18, 22], [1, 20, 22], [1, 22, 22], [1, 24, 22]],
}
TOWERS_SMALL: dict[str, Any] = {
    "shape": "tiny",
    "compared": [[1, 4, 6], [2, 4, 4]],
    "images": [[1, 4, 6], [1, 6, 4]],
    "short_video": [[2, 4, 4]],
    "long_video": [[4, 4, 4]],
    "new_sizes": [[1, 6, 6], [1, 8, 4]],
    "rounds": 1,
}
MODELS: Mapping[str, tuple[dict[str, Any], dict[str, Any], float]] = {
    "experts": (
        {"shape": "4 layers of 30B-A3B", "count": 8, "length": 2048},
        {"shape": "small", "count": 2, "length": 32, "rounds": 1, "widths": [48]},
        60.0,
    ),
    "waits": (
        {"shape": "0.6B", "actor": OURS["fused"], "count": 2, "length": 1000, "growth": 37},
        {"shape": "tiny", "length": 64, "growth": 5, "steps": 2},
        40.0,
    ),
    "towers": (TOWERS, TOWERS_SMALL, 60.0),
    "towers, packed": (TOWERS | {"packed": True}, TOWERS_SMALL, 60.0),
    "colocate memory": (
        {"shape": "1.7B", "actor": OURS["fused"], "count": 1, "length": 2048, "expandable": False},
        {"shape": "tiny", "length": 64},
        50.0,
    ),
    "colocate memory, expandable": (
        {"shape": "1.7B", "actor": OURS["fused"], "count": 1, "length": 2048, "expandable": True},
        {"shape": "tiny", "length": 64},
        50.0,
    ),
}
"""Parts of a model with a real shape: arguments, those on tiny shapes, expected seconds."""


def _component(name: str) -> tuple[str, Job]:
    arguments, small, expected_s = COMPONENTS[name]
    program = name.split(":", maxsplit=1)[0]
    return name, Job(
        program=program,
        arguments=arguments,
        small=small,
        needs=("triton",) if program == "kernels" else (),
        expected_s=expected_s,
        limit_s=120.0,
    )


def _model(name: str) -> tuple[str, Job]:
    arguments, small, expected_s = MODELS[name]
    program = name.split(",", maxsplit=1)[0].replace(" ", "_")
    return name, Job(
        program=program,
        arguments=arguments,
        small=small,
        needs=("transformers",) if program == "towers" else ("triton",),
        expected_s=expected_s,
        limit_s=240.0,
    )


def _jobs() -> Iterator[tuple[str, Job]]:
    """All jobs, the most valuable first."""
    yield (
        "rates",
        Job(
            program="rates",
            arguments={"size": 8192, "copied_bytes": 1 << 30},
            small={"size": 256, "copied_bytes": 1 << 20, "rounds": 3},
            expected_s=20.0,
        ),
    )
    for name in COMPONENTS:
        yield _component(name)
    small_rows, large_rows, long_row = CASES
    yield _ours(small_rows, "fused")
    yield _peer(small_rows, "transformers")
    yield _ours(long_row, "fused")
    yield "8B, 8 x 16,384: without optimizer", _step(LARGE | {"who": "alone"}, 70.0, 600.0)
    yield _model("experts")
    yield _model("waits")
    yield _model("colocate memory")
    yield _engine("0")
    yield _model("towers")
    yield _model("towers, packed")
    yield _ours(small_rows, "plain")
    yield _peer(small_rows, "transformers + Liger")
    yield _model("colocate memory, expandable")
    yield "8B, 8 x 16,384: offloaded", _step(LARGE, 150.0, 600.0)
    yield from _copies()
    yield _ours(large_rows, "fused")
    yield _peer(large_rows, "transformers + Liger")
    yield _ours(long_row, "fused, recomputed")
    yield _packing("fused")
    for kind in ("fused", "plain"):
        small_micro = CASES[small_rows] | {"micro": 8192, "actor": OURS[kind]}
        yield f"0.6B, micro-batches of 8,192: {kind}", _step(small_micro)
    yield _engine("colocate")
    yield _engine("1")
    longest = LARGE | {"count": 1, "length": 32768, "micro": 32768, "who": "alone"}
    yield "8B, 1 x 32,768: without optimizer", _step(longest, 90.0, 600.0)
    yield _ours(large_rows, "plain")
    yield _packing("plain")
    for name in OVERLAPPED:
        yield _overlapped(name)
    for case in CASES:
        for name in PEERS:
            yield _peer(case, name)


def _packing(kind: str) -> tuple[str, Job]:
    lengths = {"rows": 64, "median": 700, "longest": 8192, "budget": 16384}
    tiny = {"shape": "tiny", "rows": 12, "median": 40, "longest": 200, "budget": 256, "rounds": 2}
    return f"0.6B, lognormal: {kind}", Job(
        program="packing",
        arguments={"shape": "0.6B", "actor": OURS[kind], **lengths},
        small=tiny,
        needs=("triton",) if kind == "fused" else (),
        environment=TRAINER_ENVIRONMENT,
    )


def _overlapped(name: str) -> tuple[str, Job]:
    """Two ranks whose gradients are summed during the last backward pass or after it."""
    actor = {"kernels": "fused", "optimizer": OVERLAPPED[name]}
    arguments = CASES["0.6B, 8 x 2,048"] | {"ranks": 2, "limit_s": 240.0, "actor": actor}
    return f"0.6B, 2 GPUs: {name}", Job(
        program="overlap",
        arguments=arguments,
        small={"shape": "tiny", "count": 2, "length": 64, "micro": 128, "steps": 2},
        needs=("triton",),
        gpus=2,
        environment=TRAINER_ENVIRONMENT,
    )


def _copies() -> Iterator[tuple[str, Job]]:
    """Copies between the device and the host: a publish, the readers of a version, a checkpoint."""
    for what, (rounds, small) in COPY_ROUNDS.items():
        yield (
            what,
            Job(
                program="copies",
                arguments={"shape": "0.6B", "actor": OURS["fused"], "what": what} | rounds,
                small={"shape": "tiny"} | small,
                needs=("triton",),
                limit_s=600.0,
                environment=TRAINER_ENVIRONMENT,
            ),
        )


def _engine(mode: str) -> tuple[str, Job]:
    """A whole run with a real engine."""
    sizes = {"shape": "0.6B", "steps": 20, "prompts": 16, "new_tokens": 512}
    tiny = {"shape": "tiny", "steps": 5, "prompts": 2, "new_tokens": 8, "kv_tokens": 4096}
    return f"mode {mode}", Job(
        program="staleness",
        arguments={"mode": mode, **sizes, "kv_tokens": 262144, "share": 0.4},
        small=tiny | {"share": 0.1},
        needs=("sglang", "transformers", "mpi4py"),
        expected_s=200.0,
        limit_s=1200.0,
    )


JOBS: Mapping[str, Job] = dict(_jobs())
