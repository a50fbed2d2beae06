"""Compares the facts of a machine with what an installation needs.

What the wheels of a lock need is in `env/requirements-*.json`, which `env/lock_needs.py` derives
from the package index. `env/setup.sh` copies the file of the installed lock into the environment.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .facts import UNKNOWN, Facts
from .gpu_vendors import DEFAULT_VENDOR, VENDORS
from .version_numbers import parse_version

INSTALLATION, GPU, PROGRAMS = "installation", "gpu", "programs"
"""Uses of a machine: pip installs the lock there; roles use GPUs; programs of the policy run in
jails, which are made of namespaces."""

NEEDS_FILE = "minimum_requirements.json"
"""File in the root of an environment: what its lock needs."""

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
    is_node_fault: bool = False
    """Whether it is a fault of this node alone, so that other nodes of its kind may work."""

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
        # An environment may be made for machines with other GPUs than this one.
        problems += _other_vendor(facts, needs, is_fatal=INSTALLATION not in uses)
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
    driver = facts.driver
    if not driver.answers:
        vendor = VENDORS.get(driver.vendor, DEFAULT_VENDOR)
        advice = f"its node needs a repair (dmesg, {vendor.smi[0]}); use other nodes"
        found = f"{vendor.driver_title} without an answer"
        yield Problem(found, "an answer", "by all GPUs", advice, is_node_fault=True)
        return
    for vendor in VENDORS.values():
        release = needs.get(vendor.release_key, "")
        oldest = vendor.oldest_driver(release)
        if not oldest or driver.vendor not in ("", vendor.name):
            continue
        needed, purpose = f"{oldest} or newer", f"by {vendor.release_title} {release}"
        count = facts.gpus_on_bus.count(vendor.name)
        if not driver.version and count:
            found = f"{count} {vendor.title} GPUs without a driver"
            yield Problem(found, needed, purpose, "install it", is_fatal=False)
        elif driver.version and _major(driver.version) < oldest:
            reason = vendor.compat_problem(driver, release, facts.compat_driver)
            if reason:
                found = f"{vendor.driver_title} {driver.version}"
                yield Problem(found, needed, purpose, f"update it; {reason}")


def uses_compat_driver(facts: Facts, needs: "dict[str, Any]") -> bool:
    """Whether the environment runs on this machine only with libraries of a newer driver, and runs
    with them."""
    driver = facts.driver
    vendor = VENDORS.get(driver.vendor, DEFAULT_VENDOR)
    release = needs.get(vendor.release_key, "")
    if not driver.version or _major(driver.version) >= vendor.oldest_driver(release):
        return False
    return not vendor.compat_problem(driver, release, facts.compat_driver)


def _other_vendor(facts: Facts, needs: "dict[str, Any]", is_fatal: bool) -> "Iterator[Problem]":
    """GPUs of another vendor than the one whose release torch is built for."""
    vendor = VENDORS.get(facts.driver.vendor)
    count = len(facts.driver.gpus)
    if vendor is None or not count or needs.get(vendor.release_key):
        return
    for other in VENDORS.values():
        release = needs.get(other.release_key, "")
        if release:
            purpose = f"by {other.release_title} {release}, for which torch is built"
            advice = f"install a torch for {vendor.release_title}, or use other nodes"
            found = f"{count} {vendor.title} GPUs"
            yield Problem(found, f"GPUs of {other.title}", purpose, advice, is_fatal)


def _gpus(facts: Facts, needs: "dict[str, Any]") -> "Iterator[Problem]":
    """Each kind of GPU for which a package has no code."""
    vendor = VENDORS.get(facts.driver.vendor, DEFAULT_VENDOR)
    if not needs.get(vendor.release_key):
        return
    targets_by_package = _wheels(facts, needs).get("gpu_targets", {})
    for capability in sorted(set(facts.driver.capabilities)):
        for package, targets in targets_by_package.items():
            if any(vendor.can_run(capability, target) for target in targets):
                continue
            found = f"GPU of compute capability {capability}"
            if len(set(facts.driver.gpus)) == 1:
                found += f" ({facts.driver.gpus[0]})"
            needed = "one of " + ", ".join(targets)
            yield Problem(found, needed, "by " + package, "use nodes with other GPUs")


def _namespaces(facts: Facts) -> "Iterator[Problem]":
    if facts.user_namespaces:
        found = f"user namespaces forbidden ({facts.user_namespaces})"
        advice = "ask the site to allow them, or see jails in docs/reference/rewards.md"
        yield Problem(found, "permission", "for jails of programs", advice)


def _major(version: str) -> int:
    """First number of a version; 0 if it has none."""
    return (*parse_version(version), 0)[0]
