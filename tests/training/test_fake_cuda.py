"""Training on a CUDA device without a GPU: waits of the host, and memory compared with `plan`.

A separate process computes with FakeTensors (`tests.helpers.fake_cuda`), so that no other test sees
the device.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.effort import effort
from tests.requirements import requires

requires("torch", "megatron", "triton", "transformers", "g++")
from tests.helpers import fake_cuda  # noqa: E402

CASES = (
    "fused",
    "fused, recomputed",
    "plain, selective",
    "entropy",
    "moments in bfloat16",
    "offloaded",
    "critic",
    "context",
    "experts in one product",
    "experts in one product, recomputed",
    "experts one by one",
    "towers",
    "towers, recomputed",
)
LAYERS = 2, 4
REAL_SHAPES = {"8B": 36, "30B-A3B, 32 experts grouped": 48}
"""Layers of the whole model. 128 experts take minutes: `env/test.sh --all`."""
if effort(0, 1):
    REAL_SHAPES |= {f"30B-A3B, 128 experts {how}": 48 for how in ("grouped", "sequential")}
NEAR = 0.1


@pytest.fixture(scope="module", name="results")
def results_fixture(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What each case recorded. One process computes all of them, because imports take longer."""
    real = [f"{model}, {layers} layers" for model in REAL_SHAPES for layers in LAYERS]
    library = fake_cuda.compile_library(tmp_path_factory.mktemp("library"))
    command = [sys.executable, "-W", "ignore", "-m", "tests.training.fake_cuda_run", *CASES, *real]
    finished = subprocess.run(
        command,
        env=fake_cuda.start_environment(library),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=effort(600, 3600),
    )
    assert finished.returncode == 0, finished.stderr[-4000:]
    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    return {line.pop("case"): line for line in lines}


def records_of(results: dict[str, Any], case: str) -> dict[str, Any]:
    """Records of a case by the name of what it did."""
    assert "error" not in results[case], results[case]["error"]
    return results[case]["records"]


def waits_in(record: dict[str, Any]) -> dict[str, int]:
    """Calls in which the host waits for the device: reads and copies."""
    return record["waits"] | record["copies"]


def test_single_operations_are_recorded(results: dict[str, Any]) -> None:
    """What makes the host wait, and what does not."""
    records = records_of(results, "probes")
    kinds: dict[str, list[str]] = {}
    for name, record in records.items():
        kinds[name] = [kind for kind in ("waits", "copies", "host_operands") if record[kind]]
    free, waits, copies = list[str](), ["waits"], ["copies"]
    assert kinds == {
        **dict.fromkeys(("arithmetic", "number", "pinned", "memory"), free),
        **dict.fromkeys(("item", "tolist", "mask", "synchronize"), waits),
        **dict.fromkeys(("copy", "upload", "pageable"), copies),
        "index": ["host_operands"],
    }
    allocated = records["memory"]["peak_bytes"] - records["memory"]["start_bytes"]
    assert allocated == pytest.approx(4 << 20, rel=0.001)


@pytest.mark.parametrize("case", CASES)
def test_passes_keep_the_host_free(case: str, results: dict[str, Any]) -> None:
    """No wait, no blocking copy, no operand on the host: in log-probabilities or values, and in
    forward and backward passes. Experts one by one need their sizes once in each pass of a layer."""
    for name, record in records_of(results, case).items():
        if not name.startswith(("scores", "accumulate")):
            continue
        waits = waits_in(record)
        if case == "experts one by one":
            assert list(waits.values()) == [2] and "run_experts" in str(waits), (name, waits)
        else:
            assert waits == {}, (name, waits)
        assert record["host_operands"] == {}, name
        assert record["operations"] > 100


@pytest.mark.parametrize("case", CASES)
def test_a_step_waits_twice(case: str, results: dict[str, Any]) -> None:
    """Once more if metrics are new, and once for states that return to the host."""
    records = records_of(results, case)
    for name, names in (("step 1", 1), ("step 2", 0)):
        waits = waits_in(records[name])
        offload = [place for place in waits if "offloaded_adam.py" in place]
        assert len(offload) == (case == "offloaded"), waits
        assert sum(waits.values()) == 2 + names + len(offload), waits
        assert records[name]["host_operands"] == {}, name


def test_kernels_are_launched_as_on_a_gpu(results: dict[str, Any]) -> None:
    launched: set[str] = set()
    for case in CASES:
        for record in records_of(results, case).values():
            launched |= set(record["launches"])
    forward = {"_norm_forward", "_rotate_heads", "_swiglu_forward", "_terms"}
    assert launched == forward | {"_norm_backward", "_swiglu_backward", "_slopes", "_adamw"}


@pytest.mark.parametrize("model", REAL_SHAPES)
def test_a_row_of_16384_tokens_takes_what_plan_calculates(
    model: str, results: dict[str, Any]
) -> None:
    """Bytes of a whole model, extrapolated from two and four layers, without the CUDA context."""
    counted: list[dict[str, int]] = []
    planned: list[dict[str, float]] = []
    for layers in LAYERS:
        case = f"{model}, {layers} layers"
        peaks: dict[str, int] = {}
        for name, record in records_of(results, case).items():
            peaks[name.split()[0]] = record["peak_bytes"]
        counted.append(peaks)
        planned.append(results[case]["plan"])

    def extrapolate(few: float, more: float) -> float:
        each = (more - few) / (LAYERS[1] - LAYERS[0])
        return few + each * (REAL_SHAPES[model] - LAYERS[0])

    peak = max(extrapolate(*(peaks[name] for peaks in counted)) for name in counted[0])
    stays = extrapolate(*(sizes.pop("stays") for sizes in planned))
    phases = (extrapolate(*(sizes[name] for sizes in planned)) for name in planned[0])
    assert stays + max(phases) == pytest.approx(peak, rel=NEAR)
