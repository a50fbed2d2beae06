"""All figures of tools/gpu/rows.py, one process after the other, and the table that they make.

python tools/gpu/table.py --only step --store
python tools/gpu/table.py --device cpu --small
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from child import ask
from found import has, version
from rows import COLUMNS, JOBS, ROWS, Figures, Job

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools/bench/results"
PROGRAMS = tuple(dict.fromkeys(job.program for job in JOBS.values()))
_ON_GPUS_ALONE = {"triton": "fused kernels", "liger_kernel": "Liger"}


def measured(job: Job, device: str, small: bool) -> Figures:
    """What its process says, or the `error` for which there is nothing."""
    if lacking := [
        name
        for name in job.needs
        if not has(name) and (device == "cuda" or name not in _ON_GPUS_ALONE)
    ]:
        return {"error": f"not measured: no {lacking[0]}"}
    if device == "cuda" and torch.cuda.device_count() < job.gpus:
        return {"error": f"not measured: needs {job.gpus} GPUs"}
    if device == "cpu" and "liger_kernel" in job.needs:
        return {"error": "not measured: needs a GPU"}
    return ask(job.program, {**job.about, **(job.small if small else {})}, device, job.limit_s)


def said(figures: Figures) -> str:
    """A line for people."""
    return figures.get("error") or ", ".join(
        f"{name} {value:.4g}" for name, value in figures.items()
    )


def machine(device: str) -> dict[str, Any]:
    """What figures are of."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    commit = (
        subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        or "not known"
    )
    about = {
        "device": "cpu",
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    packages = {
        name: version(name)
        for name in ("triton", "transformers", "liger-kernel", "sglang", "megatron-core")
    }
    about |= {name: found for name, found in packages.items() if found != "?"}
    about |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        try:
            driver = subprocess.run(
                query, capture_output=True, text=True, timeout=60, check=True
            ).stdout.split()[0]
        except (OSError, subprocess.SubprocessError, IndexError):
            driver = "not known"
        about |= {
            "device": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "driver": driver,
        }
    return about


def store(about: Mapping[str, Any], found: Mapping[str, Figures]) -> Path:
    """A file for each kind of device: what was measured anew replaces what it had of the same
    commit and torch."""
    RESULTS.mkdir(exist_ok=True)
    path = (
        RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', str(about['device']).lower()).strip('-')}.json"
    )
    before = json.loads(path.read_text()) if path.exists() else {}
    same = all(before.get("machine", {}).get(key) == about[key] for key in ("commit", "torch"))
    kept = before["measured"] if same else {}
    path.write_text(json.dumps({"machine": about, "measured": kept | found}, indent=1) + "\n")
    return path


def main() -> int:
    """0; 1 if a measurement of ours failed for another cause than memory, a package or a GPU that
    is not there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="tiny shapes")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, default=PROGRAMS)
    parser.add_argument(
        "--store", action="store_true", help=f"keep the figures in {RESULTS.relative_to(ROOT)}"
    )
    args = parser.parse_args()
    about, found = machine(args.device), dict[str, Figures]()
    print(", ".join(f"{name} {value}" for name, value in about.items()), flush=True)
    for name, job in JOBS.items():
        if job.program in (*args.only, "rates"):
            found[name] = measured(job, args.device, args.small)
            print(f"{name} | {said(found[name])}", flush=True)
    true = args.device == "cuda" and not args.small
    lines = [
        COLUMNS,
        *(
            row.cells(found, judged=true)
            for row in ROWS
            if set(row.jobs) & found.keys() - {"rates"}
        ),
    ]
    print("", *(" | ".join(line) for line in lines), sep="\n")
    if not true:
        print(
            "On tiny shapes, or on a CPU, the figures mean nothing: they show that each can be "
            "measured."
        )
    elif args.store:
        print(
            f"stored: {store(about, found)}; python tools/docs shows it in docs/benchmarks/gpu.md"
        )
    failed = [
        name
        for name, one in found.items()
        if JOBS[name].ours and str(one.get("error")).startswith("FAILED")
    ]
    if failed:
        print(f"FAILED to be measured: {'; '.join(failed)}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
