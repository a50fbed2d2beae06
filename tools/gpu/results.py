"""Files with the figures of tools/gpu/check.sh, one for each kind of device, in
tools/bench/results."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from requirements import version
from rows import Figures

from relax_hpc.base.rundir import write_json

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tools/bench/results"
COMMIT_VARIABLE = "RELAX_COMMIT"
"""Environment variable with the commit, for a copy of the project without its git folder."""
_COMMAND_LIMIT_S = 60.0


def machine(device: str) -> dict[str, Any]:
    """Device, commit and versions of packages, which are stored with figures."""
    description: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
    }
    for package in ("triton", "transformers", "liger-kernel", "sglang", "megatron-core"):
        if version(package) != "?":
            description[package] = version(package)
    description |= {"cores": os.cpu_count(), "load": round(os.getloadavg()[0], 2)}
    if device == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = _output(query).split()
        description |= {
            "cuda": torch.version.cuda,
            "driver": driver[0] if driver else "not known",
        }
    return description


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    return os.environ.get(COMMIT_VARIABLE) or _output(command).strip() or "not known"


def _output(command: list[str]) -> str:
    """Standard output of a command; empty if it cannot be run."""
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_LIMIT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return process.stdout


def path_of(device_name: str, folder: Path) -> Path:
    """File with the figures of a kind of device.

    >>> path_of("NVIDIA H100 80GB HBM3", Path("results")).as_posix()
    'results/gpu-nvidia-h100-80gb-hbm3.json'
    """
    name = re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-")
    return folder / f"gpu-{name}.json"


def load(description: Mapping[str, Any], folder: Path) -> dict[str, Figures]:
    """Stored figures by job, if their device, commit and torch are those of ``description``."""
    path = path_of(description["device"], folder)
    if not path.exists():
        return {}
    stored = json.loads(path.read_text())
    for key in ("commit", "torch"):
        if stored.get("machine", {}).get(key) != description[key]:
            return {}
    return dict(stored["measured"])


def store(description: Mapping[str, Any], measured: Mapping[str, Figures], folder: Path) -> Path:
    """Replace the file of the device in ``folder``. Return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(description["device"], folder)
    write_json(path, {"machine": description, "measured": measured})
    return path
