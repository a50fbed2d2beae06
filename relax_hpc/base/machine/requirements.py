"""Compares the facts of a machine with what an installation needs.

What the wheels of a lock need is in `env/requirements-*.json`, which `env/lock_needs.py` derives
from the package index. `env/setup.sh` copies the file of the installed lock into the environment.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .compat_driver import VARIABLE, forbidden_reason
from .facts import UNKNOWN, Facts
from .version_numbers import parse_version

INSTALLATION, GPU, PROGRAMS = "installation", "gpu", "programs"
"""Uses of a machine: pip installs the lock there; roles use GPUs; programs of the policy run in
jails, which are made of namespaces."""

NEEDS_FILE = "minimum_requirements.json"
"""File in the root of an environment: what its lock needs."""

OLDEST_DRIVERS = {11: 450, 12: 525, 13: 580}
"""CUDA's major version -> the oldest branch of the NVIDIA driver that runs it.

Source: NVIDIA, "CUDA Compatibility", chapter "Minor Version Compatibility", table 1 (and the CUDA
Toolkit release notes, which it refers to). Package cuda-compat lets data-centre GPUs run a newer
CUDA on an older driver: its `libcuda.so` is used in place of the driver's.
"""

MIN_OPEN_FILES = 4096
"""The kernel's own default of the hard limit (INR_OPEN_MAX). NCCL has a socket for each channel and
peer, and the controller of the queue one for each client; it closes those beyond the limit."""


class Problem(NamedTuple):
    """A minimum requirement that a machine does not meet. If it `is_fatal`, nothing can work."""

    found: str
    needed: str
    purpose: str
    """Package or use that needs it, with a preposition: `by sglang 0.5.21`."""
    advice: str
    is_fatal: bool = True

    def __str__(self) -> str:
        return f"{self.found} found, {self.needed} needed {self.purpose}: {self.advice}"


def find_problems(
    facts: Facts, needs: "dict[str, Any]", uses: "Sequence[str]" = ()
) -> "list[Problem]":
    """Requirements that ``facts`` do not meet. A fact that could not be read is not compared.

    ``needs``: content of a `NEEDS_FILE`; empty if the lock of an environment is unknown.
    """
    if facts.system and facts.system != "Linux":
        advice = "use a Linux machine or a container"
        return [Problem(facts.system, "Linux", "by all roles", advice)]
    problems = list(_open_files(facts))
    if needs.get("architectures"):
        problems += [*_architecture(facts, needs), *_libc(facts, needs), *_python(facts, needs)]
        if INSTALLATION in uses:
            # Without CUDA another index may have far smaller builds of torch, and pip may have kept
            # its downloads. So the space is then an estimate, which must not end an installation.
            problems += _disks(facts, _wheels(facts, needs), is_fatal=bool(needs["cuda"]))
    if GPU in uses:
        problems += [*_compiler(facts), *_driver(facts, needs), *_gpus(facts, needs)]
    if PROGRAMS in uses:
        problems += _namespaces(facts)
    return problems


def load_needs(prefix: str = sys.prefix) -> "dict[str, Any]":
    """Content of the `NEEDS_FILE` of the environment ``prefix``. It is empty if `env/setup.sh` did
    not make the environment."""
    try:
        return read_needs(Path(prefix, NEEDS_FILE))
    except (OSError, ValueError):
        return {}


def read_needs(path: Path) -> "dict[str, Any]":
    """Content of a file that `env/lock_needs.py` wrote. ValueError: it is another file."""
    needs = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(needs, dict) or not isinstance(needs.get("architectures"), dict):
        raise ValueError(f"{path}: not a file of env/lock_needs.py; write it again")
    return needs


def _wheels(facts: Facts, needs: "dict[str, Any]") -> "dict[str, Any]":
    """Part of ``needs`` about the architecture of this machine; empty if the lock does not support
    it."""
    part = needs.get("architectures", {}).get(facts.architecture, {})
    return {} if "missing" in part else part


def _architecture(facts: Facts, needs: "dict[str, Any]") -> "Iterator[Problem]":
    parts = needs["architectures"]
    supported = [name for name, part in parts.items() if "missing" not in part]
    if not facts.architecture or facts.architecture in supported:
        return
    missing = parts.get(facts.architecture, {}).get("missing") or ["the wheels of this lock"]
    purpose = "by " + ", ".join(missing)
    advice = "install on a machine with such a CPU, and run there"
    found = "CPU architecture " + facts.architecture
    yield Problem(found, " or ".join(supported), purpose, advice)


def _libc(facts: Facts, needs: "dict[str, Any]") -> "Iterator[Problem]":
    wheels = _wheels(facts, needs)
    name, _, version = facts.libc.partition(" ")
    if not wheels or not name:
        return
    needed, purpose = wheels["glibc"], "by " + wheels["glibc_package"]
    advice = "use site.container (env/relax_hpc.def)"
    if name != "glibc":
        yield Problem(facts.libc, "glibc " + needed, purpose, advice)
    elif parse_version(version) < parse_version(needed):
        yield Problem(facts.libc, needed, purpose, advice)


def _python(facts: Facts, needs: "dict[str, Any]") -> "Iterator[Problem]":
    supported = needs["pythons"]
    if facts.python and ".".join(facts.python.split(".")[:2]) not in supported:
        advice = "install python3.11-venv, load a module, or set RELAX_PYTHON=/path/to/python3.11"
        purpose = "by the wheels of this lock"
        yield Problem("Python " + facts.python, " or ".join(supported), purpose, advice)


def _disks(facts: Facts, wheels: "dict[str, Any]", is_fatal: bool) -> "Iterator[Problem]":
    """Space for the environment, and for downloads, which pip keeps until all are there."""
    if not wheels:
        return
    installed, downloaded = wheels["installed_bytes"], wheels["download_bytes"]
    environment, temporary = facts.disk, facts.temporary_disk
    is_shared = environment.device == temporary.device
    advice = "free some, or set {} to a folder on another disk"
    if is_shared:
        installed += downloaded
    if environment.free_bytes != UNKNOWN and environment.free_bytes < installed:
        found = f"{_gigabytes(environment.free_bytes)} free in {environment.path}"
        purpose = "for the installation"
        advised = advice.format("RELAX_VENV")
        yield Problem(found, _gigabytes(installed), purpose, advised, is_fatal)
    if not is_shared and temporary.free_bytes != UNKNOWN and temporary.free_bytes < downloaded:
        found = f"{_gigabytes(temporary.free_bytes)} free in {temporary.path}"
        advised = advice.format("TMPDIR")
        yield Problem(found, _gigabytes(downloaded), "for downloads", advised, is_fatal)


def _gigabytes(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB"


def _open_files(facts: Facts) -> "Iterator[Problem]":
    if facts.open_files != UNKNOWN and facts.open_files < MIN_OPEN_FILES:
        found = f"nofile limit (ulimit -Hn) {facts.open_files}"
        advice = "ask the site to raise it (limits.conf, LimitNOFILE of slurmd)"
        yield Problem(found, str(MIN_OPEN_FILES), "for connections", advice)


def _compiler(facts: Facts) -> "Iterator[Problem]":
    if not facts.c_compiler:
        # Triton compiles a launcher in C for each kernel when it is first used.
        found, advice = "no C compiler", "install gcc, load its module in site.modules, or set CC"
        yield Problem(found, "gcc or cc on PATH, or CC", "by Triton", advice)


def _driver(facts: Facts, needs: "dict[str, Any]") -> "Iterator[Problem]":
    """A machine without GPUs, such as a login node, needs no driver."""
    driver, cuda = facts.driver, needs.get("cuda", "")
    if not driver.answers:
        advice = "its node needs a repair (dmesg, nvidia-smi); use other nodes"
        yield Problem("NVIDIA driver without an answer", "an answer", "by all GPUs", advice)
        return
    oldest = OLDEST_DRIVERS.get(_major(cuda))
    if oldest is None:
        return
    needed, purpose = f"{oldest} or newer", f"by CUDA {cuda}"
    if not driver.version and facts.nvidia_devices:
        found, advice = f"{facts.nvidia_devices} NVIDIA GPUs without a driver", "install it"
        yield Problem(found, needed, purpose, advice, is_fatal=False)
    elif driver.version and _major(driver.version) < oldest:
        reason = compat_problem(facts, cuda)
        if reason:
            advice = f"update it; {reason}"
            yield Problem("NVIDIA driver " + driver.version, needed, purpose, advice)


def uses_compat_driver(facts: Facts, cuda: str) -> bool:
    """Whether CUDA ``cuda`` runs on this machine only with the package cuda-compat, and runs
    with it."""
    driver = facts.driver.version
    oldest = OLDEST_DRIVERS.get(_major(cuda), 0)
    return bool(driver) and _major(driver) < oldest and not compat_problem(facts, cuda)


def compat_problem(facts: Facts, cuda: str) -> str:
    """Reason why the package cuda-compat does not make an old driver run CUDA ``cuda``; empty if it
    does."""
    compat = facts.compat_driver
    for gpu in sorted(set(facts.driver.gpus)):
        reason = forbidden_reason(gpu, facts.driver.version, _major(cuda), compat.is_chosen)
        if reason:
            return reason
    if _major(compat.version) >= OLDEST_DRIVERS.get(_major(cuda), 0):
        return ""
    package = "cuda-compat-" + "-".join(cuda.split(".")[:2])
    return f"or install {package}, and name its folder in site.env.{VARIABLE}"


def _gpus(facts: Facts, needs: "dict[str, Any]") -> "Iterator[Problem]":
    """Each kind of GPU for which a package has no code."""
    targets_by_package = _wheels(facts, needs).get("gpu_targets", {})
    for capability in sorted(set(facts.driver.capabilities)):
        for package, targets in targets_by_package.items():
            if any(_can_run(capability, target) for target in targets):
                continue
            found = f"GPU of compute capability {capability}"
            if len(set(facts.driver.gpus)) == 1:
                found += f" ({facts.driver.gpus[0]})"
            needed = "one of " + ", ".join(targets)
            yield Problem(found, needed, "by " + package, "use nodes with other GPUs")


def _can_run(capability: str, target: str) -> bool:
    """Machine code runs on GPUs of its major version that are not older. PTX is compiled for all
    newer ones (NVIDIA, CUDA C++ Programming Guide, "Binary Compatibility")."""
    gpu, code = parse_version(capability), parse_version(target.partition("+")[0])
    return gpu >= code and (gpu[0] == code[0] or target.endswith("+PTX"))


def _namespaces(facts: Facts) -> "Iterator[Problem]":
    if facts.user_namespaces:
        found = f"user namespaces forbidden ({facts.user_namespaces})"
        advice = "ask the site to allow them, or see jails in docs/reference/rewards.md"
        yield Problem(found, "permission", "for jails of programs", advice)


def _major(version: str) -> int:
    """First number of a version; 0 if it has none."""
    return (*parse_version(version), 0)[0]
