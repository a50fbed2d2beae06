"""The key of an archive: properties of a machine and its software on which compiled kernels
depend."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.machine.facts import Facts, read_facts
from relax_hpc.net.kernel_caches.archive import SUFFIX

PACKAGES = (
    "torch",
    "triton",
    "sglang",
    "sglang-kernel",
    "flashinfer-python",
    "sgl-deep-gemm",
    "apache-tvm-ffi",
    "tilelang",
    "nvidia-cutlass-dsl",
    "quack-kernels",
    "humming-kernels",
)
"""Distributions that compile kernels, or whose kernels are compiled."""
_NOT_SHAPE = ("_name_or_path", "transformers_version")
"""Fields of a model's config.json on which no kernel depends."""
_DIGEST_CHARS = 16
_DRIVER_DEADLINE_S = 10.0


def read_key(model: Path) -> dict[str, str]:
    """Key of this machine and of the model in folder ``model``. RelaxError: the driver of the GPUs
    does not answer. ConfigError: the folder has no config.json."""
    return key_of_machine(read_facts(driver_deadline_s=_DRIVER_DEADLINE_S), _cpu_flags()) | {
        "model": model_shape(model)
    }


def key_of_machine(facts: Facts, cpu_flags: str) -> dict[str, str]:
    """Key of a machine without the model. ``cpu_flags``: instructions of its CPUs."""
    driver = facts.driver
    if not driver.answers:
        raise RelaxError("the driver of the GPUs does not answer")
    packages = {name: text for name in PACKAGES if (text := _version_of(name))}
    return {
        "architecture": facts.architecture,
        # C++ kernels of inductor and launchers of Triton are compiled with -march=native.
        "cpu": _digest(cpu_flags),
        "libc": facts.libc,
        "gpus": ", ".join(sorted(set(driver.gpus))),
        "capability": ", ".join(sorted(set(driver.capabilities))),
        "vendor": driver.vendor,
        "driver": driver.version,
        # Some GPUs use the libraries of a newer driver, which also compile (PTX).
        "compat_driver": facts.compat_driver.version,
        "python": f"{platform.python_implementation()} {sys.version_info[0]}.{sys.version_info[1]}",
        **packages,
    }


def model_shape(model: Path) -> str:
    """Digest of the fields of a model's config.json that may change the shapes of kernels."""
    fields = read_json_object(model / "config.json")
    for name in _NOT_SHAPE:
        fields.pop(name, None)
    return _digest(json.dumps(fields, sort_keys=True))


def archive_name(key: Mapping[str, str]) -> str:
    """File name of the archive for ``key``, such as `x86_64-9.0-3f2a51c09b7d6e42.tar.zst`."""
    label = f"{key.get('architecture', '')}-{key.get('capability') or 'cpu'}"
    plain = re.sub(r"[^A-Za-z0-9_.]+", "-", label)
    return f"{plain}-{_digest(json.dumps(dict(key), sort_keys=True))}{SUFFIX}"


def _version_of(distribution: str) -> str:
    """Installed version, with its build such as `+cu130`; empty if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def _cpu_flags() -> str:
    """Instructions of the first CPU by the kernel, sorted; empty if it names none."""
    try:
        text = Path("/proc/cpuinfo").read_text(errors="replace")
    except OSError:
        return ""
    # x86 has `flags`, Arm has `Features`.
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    return " ".join(sorted(match[1].split())) if match else ""


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS]
