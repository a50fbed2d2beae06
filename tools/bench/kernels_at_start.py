"""What a rank takes to compare kernels with plain layers at start, and how far from float32 both
are.

    TRITON_INTERPRET=1 python tools/bench/kernels_at_start.py configs/models/Qwen3-0.6B --device cpu

On a CPU kernels run in Triton's interpreter, slowly, and cut bfloat16 off instead of rounding it.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from figures import Figure, print_figures

from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.training import parallel
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.kernels import prepare

START_TIMEOUT_S = 60.0


def compare(model: Path, device: str, dtype: str) -> list[Figure]:
    """Seconds, and the distances of the values of which the kernels' are furthest from the plain
    layers'."""
    parallel.initialize_alone(device, 0, START_TIMEOUT_S)
    prepare("fused", device)
    from relax_hpc.training.parity import LayerSlice, distances
    from relax_hpc.training.triton_logprobs import TritonKernels

    of = LayerSlice.from_spec(
        spec_from_config(read_config(model)),
        ModelConfig(dtype=dtype, device=device),
        ParallelConfig(),
        {},
    )
    began, at_work = time.monotonic(), time.process_time()
    found = distances(of, "fused", TritonKernels())
    taken, worked = time.monotonic() - began, time.process_time() - at_work
    kind = max(found, key=lambda one: found[one].ratio)
    return [
        Figure("comparison at start", taken, "s"),
        Figure("its processor time", worked, "s"),
        Figure(f"furthest, {kind}: kernels", found[kind].kernels, "of its norm"),
        Figure(f"furthest, {kind}: plain", found[kind].plain, "of its norm"),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path, help="a directory with config.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    print_figures(
        compare(args.model, args.device, args.dtype),
        {"model": args.model, "dtype": args.dtype},
        args.json,
    )


if __name__ == "__main__":
    main()
