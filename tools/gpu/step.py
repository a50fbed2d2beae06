"""What an optimizer step costs, ours beside transformers', each in a process of its own, one after the other.

Random weights and tokens; medians of the steps after the first. MFU is of what the model needs
(relax_hpc.models.flops), once of the peak that the device's maker states, once of a large matrix product measured
before. The peers' loss is plain cross entropy: no entropy, no ratios; those with fp32 masters keep what ours keeps, the
others bfloat16 alone.

    python tools/gpu/step.py --json
    python tools/gpu/step.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any

import torch
from found import has, version
from shapes import hf_config, rows

from relax_hpc.engines.transformers_hook import install_transformers_hook
from relax_hpc.models.families import spec_of
from relax_hpc.models.flops import peak_flops, training_flops

PEERS = ("transformers", "transformers, fp32 masters", "transformers + Liger", "transformers + Liger, fp32 masters")
OURS = ("relax_hpc", "relax_hpc, recomputed", "relax_hpc, fused kernels", "relax_hpc, fused kernels, recomputed")
WHO = (*OURS, *PEERS)
CASES = (("0.6B", 8, 2048, 8192), ("0.6B", 8, 2048, 16384), ("1.7B", 8, 2048, 8192), ("0.6B", 1, 16384, 16384))
SMALL = (("tiny", 4, 64, 128),)
"""Shape, rows, tokens of each, tokens of a micro-batch."""
COLUMNS = ["shape", "rows x tokens", "micro", "who", "forward + backward, ms", "host, ms", "optimizer, ms", "tokens/s"]
COLUMNS += ["MFU, of the stated peak", "of the measured one", "memory, GiB"]
LIMIT_S = 300.0


def sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def ours(shape: str, micro_batches: list[list[dict]], device: str, who: str) -> tuple[Callable, Callable]:
    from relax_hpc.algorithms import Grpo
    from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig
    from relax_hpc.training import parallel
    from relax_hpc.training.batches import collate

    parallel.initialize_alone(device, 0, 120.0)
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.trainer import Trainer

    kernels, recompute = "fused" if "fused" in who else "plain", "full" if "recomputed" in who else "none"
    actor = ActorConfig(kernels=kernels, recompute=recompute)
    model = PolicyModel(hf_config(shape), ModelConfig(dtype="bfloat16", device=device), ParallelConfig(), actor)
    trainer = Trainer.of(model, Grpo(), actor, 1.0)
    batches = [collate(part, 0, device) for part in micro_batches]
    return lambda: trainer.accumulate(batches), lambda: trainer.step(1e-6)


def peer(
    shape: str, micro_batches: list[list[dict]], device: str, liger: bool, masters: bool
) -> tuple[Callable, Callable]:
    install_transformers_hook()
    from transformers import AutoConfig, AutoModelForCausalLM

    about = hf_config(shape)
    config = AutoConfig.for_model(about.pop("model_type"), **about)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").to(device)
    model.train().config.use_cache = False
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=model)
    live = list(model.parameters())
    kept = [one.detach().float() for one in live] if masters else live
    optimizer = torch.optim.AdamW(kept, lr=1e-6, fused=device == "cuda")
    ids = [torch.tensor([row["token_ids"].tolist() for row in part], device=device) for part in micro_batches]

    def accumulate() -> None:
        for tokens in ids:
            (model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(ids)).backward()

    def step() -> None:
        for one, master in zip(live, kept, strict=True) if masters else ():
            master.grad, one.grad = one.grad.float(), None
        torch.nn.utils.clip_grad_norm_(kept, 1.0)
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(live, kept)
        optimizer.zero_grad(set_to_none=True)

    return accumulate, step


def measure(who: str, shape: str, count: int, length: int, micro: int, device: str, steps: int) -> dict[str, float]:
    """Seconds of a step's parts, and the most memory that was allocated."""
    samples, each = rows(count, length, hf_config(shape)["vocab_size"]), max(1, micro // length)
    parts = [samples[at : at + each] for at in range(0, count, each)]
    if who in PEERS:
        accumulate, step = peer(shape, parts, device, "Liger" in who, "masters" in who)
    else:
        accumulate, step = ours(shape, parts, device, who)
    times: list[list[float]] = []
    for _ in range(steps + 1):
        sync(device)
        marks = [time.perf_counter()]
        accumulate()
        marks.append(time.perf_counter())
        sync(device)
        marks.append(time.perf_counter())
        step()
        sync(device)
        marks.append(time.perf_counter())
        times.append([marks[2] - marks[0], marks[1] - marks[0], marks[3] - marks[2]])
    both, host, optimizer = (median(column) for column in zip(*times[1:], strict=True))
    memory = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return {"both": both, "host": host, "optimizer": optimizer, "memory": memory}


def matmul_rate(device: str) -> float:
    """Operations a second of one large product in bfloat16."""
    size, rounds = (8192, 20) if device == "cuda" else (256, 3)
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for count in (3, rounds):
        sync(device)
        started = time.perf_counter()
        for _ in range(count):
            left @ right
        sync(device)
    return 2 * size**3 * rounds / (time.perf_counter() - started)


def missing(who: str) -> str:
    """The package that ``who`` lacks here."""
    needed = ["transformers"] * (who in PEERS) + ["liger_kernel"] * ("Liger" in who) + ["triton"] * ("fused" in who)
    return next((name for name in needed if not has(name)), "")


def table(cases: tuple, device: str, rate: float) -> Iterator[tuple[list[str], bool]]:
    """Rows as they are measured, and whether one of ours came to nothing for another cause than memory."""
    peak = peak_flops(torch.cuda.get_device_name()) if device == "cuda" else None
    for shape, count, length, micro in cases:
        for who in WHO:
            head = [shape, f"{count} x {length}", str(micro), who]
            if name := missing(who):
                yield [*head, f"not measured: no {name}", *[""] * (len(COLUMNS) - 5)], False
                continue
            if device == "cpu" and ("Liger" in who or "fused" in who):
                yield [*head, "not measured: needs a GPU", *[""] * (len(COLUMNS) - 5)], False
                continue
            about = json.dumps({"who": who, "shape": shape, "count": count, "length": length, "micro": micro})
            found = in_a_process(about, device)
            if "both" not in found:
                yield [*head, found["error"], *[""] * (len(COLUMNS) - 5)], who not in PEERS and not found["memory"]
                continue
            seconds = found["both"] + found["optimizer"]
            flops = training_flops(spec_of(hf_config(shape)), [length] * count) / seconds
            times = [f"{1e3 * found[part]:.1f}" for part in ("both", "host", "optimizer")]
            shares = [f"{flops / peak:.2f}" if peak else "not known", f"{flops / rate:.2f}"]
            memory = f"{found['memory']:.1f}" if device == "cuda" else ""
            yield [*head, *times, f"{count * length / seconds:,.0f}", *shares, memory], False


def in_a_process(about: str, device: str) -> dict[str, Any]:
    """What `measure` gives; an `error` where it does not, and whether `memory` was what it lacked."""
    command = [sys.executable, __file__, "--one", about, "--device", device]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"error": f"not done in {LIMIT_S:g} s", "memory": False}
    with suppress(ValueError, IndexError):
        return json.loads(done.stdout.splitlines()[-1])
    last = (done.stderr.strip().splitlines() or [f"code {done.returncode}"])[-1]
    memory = "OutOfMemoryError" in done.stderr
    return {"error": "out of memory" if memory else f"FAILED: {last[:120]}", "memory": memory}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--steps", type=int, default=4, help="after the first")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(**json.loads(args.one), device=args.device, steps=args.steps)))
        return 0
    rate, found, failed = matmul_rate(args.device), [], False
    name = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    print(f"{name}: {rate / 1e12:.3g} TFLOP/s in a product of bfloat16 matrices", flush=True)
    for row, is_failure in table(SMALL if args.small else CASES, args.device, rate):
        found.append(row)
        failed |= is_failure
        print(" | ".join(row), flush=True)
    if args.json:
        settings = {"device": name, "matmul_flops": rate, "torch": torch.__version__}
        settings |= {"transformers": version("transformers"), "liger": version("liger-kernel")}
        print(json.dumps({"columns": COLUMNS, "rows": found, "settings": settings}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
