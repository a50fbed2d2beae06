"""Installation: the declared package, its locks, and the scripts under env/."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.requirements import requires

ROOT = Path(__file__).resolve().parent.parent
LOCKS = sorted((ROOT / "env").glob("requirements-*.txt"))
IMPORT_NAMES = {
    "yaml": "pyyaml",
    "megatron": "megatron-core",
    "PIL": "pillow",
    "nixl_cu12": "nixl-cu12",
}
LIGHT = ["cli.py", "errors.py", "versions.py", "config", "launch", "rendezvous"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: Path) -> dict[str, str]:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    return {canonical(name): version for name, version in (line.split("==") for line in lines)}


def declared(*extras: str) -> set[str]:
    found = map(Requirement, metadata.requires("relax_hpc") or [])
    contexts = [{"extra": extra} for extra in ("", *extras)]
    return {canonical(r.name) for r in found if not r.marker or any(r.marker.evaluate(c) for c in contexts)}


def third_party(path: Path, everywhere: bool) -> Iterator[str]:
    """Packages that a file imports: at its top level only, or in its functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        for top in {module.split(".")[0] for module in modules}:
            if top not in sys.stdlib_module_names | {"relax_hpc"}:
                yield canonical(IMPORT_NAMES.get(top, top))


def test_every_import_is_declared() -> None:
    known = declared("all")
    files = (ROOT / "relax_hpc").rglob("*.py")
    missing = {f"{f.relative_to(ROOT)}: {n}" for f in files for n in third_party(f, True) if n not in known}
    assert not missing, f"add to setup.py: {sorted(missing)}"


def test_light_modules_import_only_the_base_requirements() -> None:
    base = declared()
    paths = [ROOT / "relax_hpc" / name for name in LIGHT]
    files = [file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))]
    heavy = {f"{f.relative_to(ROOT)}: {n}" for f in files for n in third_party(f, False) if n not in base}
    assert not heavy, f"import these inside the function that needs them: {sorted(heavy)}"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in (ROOT / "relax_hpc").rglob("*.py")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_console_script_is_declared() -> None:
    scripts = {e.name: e.value for e in metadata.distribution("relax_hpc").entry_points if e.group == "console_scripts"}
    assert scripts == {"relax-hpc": "relax_hpc.cli:main"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_lock_is_sorted_pins_and_nothing_else(lock: Path) -> None:
    lines = [line for line in lock.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line) for line in lines)
    names = [canonical(line.split("==")[0]) for line in lines]
    assert names == sorted(set(names))


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_locks_satisfy_the_declared_requirements(lock: str) -> None:
    have = pins(ROOT / f"env/requirements-{lock}.txt") | pins(ROOT / "env/requirements-dev.txt")
    wanted = [Requirement(r) for r in metadata.requires("relax_hpc") or []]
    wanted = [r for r in wanted if 'extra == "rdma"' not in str(r) and 'extra == "all"' not in str(r)]
    assert not [str(r) for r in wanted if not r.specifier.contains(have.get(canonical(r.name), "0"), prereleases=True)]


def test_gpu_and_cpu_locks_agree_on_what_defines_results() -> None:
    cpu, gpu = (pins(ROOT / f"env/requirements-{name}.txt") for name in ("cpu", "gpu"))
    for name in ("torch", "sglang", "megatron-core", "transformers", "tokenizers", "mpi4py", "mpich", "xgrammar"):
        assert cpu[name] == gpu[name], name


def verify(site: Path, lock: Path) -> list[str]:
    """What env/verify.py finds missing in an environment whose site-packages is `site`."""
    code = (
        "import runpy, sys, sysconfig; site = sys.argv[1]; sysconfig.get_path = lambda *a: site; "
        "main = runpy.run_path(sys.argv[2])['main']; main(sys.argv[3:])"
    )
    command = [sys.executable, "-I", "-c", code, str(site), str(ROOT / "env/verify.py"), str(lock)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.split()


def make_package(site: Path, name: str, version: str) -> None:
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (site / f"{name}.py").write_text("x = 1\n")
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "RECORD").write_text(f"{name}.py,,6\n{info.name}/METADATA,,\n{info.name}/RECORD,,\n")


def test_verify_finds_missing_wrong_and_damaged_packages(tmp_path: Path) -> None:
    site = tmp_path / "site"
    for name in ("good", "local_tag", "truncated", "deleted", "unfinished"):
        make_package(site, name, "1.0+cpu" if name == "local_tag" else "1.0")
    make_package(site, "old", "0.9")
    (site / "truncated.py").write_text("x")
    (site / "deleted.py").unlink()
    (site / "unfinished-1.0.dist-info" / "RECORD").unlink()
    names = ["good", "Local.Tag", "truncated", "deleted", "unfinished", "old", "absent"]
    lock = tmp_path / "lock.txt"
    lock.write_text("# a comment\n" + "".join(f"{name}==1.0\n" for name in names))
    assert verify(site, lock) == [f"{name}==1.0" for name in names[2:]]
    assert not (site / "unfinished-1.0.dist-info").exists(), "pip cannot replace a package that has no RECORD"


def setup(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(ROOT / "env/setup.sh"), *arguments]
    full = {**os.environ, "PIP_NO_INDEX": "1", **env}
    return subprocess.run(command, env=full, capture_output=True, text=True, timeout=60)


def test_setup_names_the_python_it_wants(tmp_path: Path) -> None:
    done = setup(RELAX_VENV=str(tmp_path / "venv"), RELAX_PYTHON="/bin/false")
    assert done.returncode == 1 and "no Python 3.11" in done.stderr and "/bin/false" in done.stderr
    assert not (tmp_path / "venv.lock").is_symlink(), "a failed call must not leave its lock"


def test_setup_refuses_an_unknown_argument(tmp_path: Path) -> None:
    done = setup("cuda", RELAX_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1 and "cuda" in done.stderr and "gpu" in done.stderr


def test_setup_waits_for_a_living_call_and_takes_over_from_a_dead_one(tmp_path: Path) -> None:
    lock, host = tmp_path / "venv.lock", os.uname().nodename
    env = {"RELAX_VENV": str(tmp_path / "venv"), "RELAX_PYTHON": "/bin/false", "RELAX_SETUP_WAIT_S": "1"}
    lock.symlink_to(f"{host}:{os.getpid()}")
    waited = setup(**env)
    assert waited.returncode == 1 and f"{host}:{os.getpid()}" in waited.stderr and "still holds" in waited.stderr
    lock.unlink()
    gone = subprocess.Popen(["/bin/true"])
    gone.wait(timeout=10)
    lock.symlink_to(f"{host}:{gone.pid}")
    assert "no Python 3.11" in setup(**env).stderr


def test_second_setup_changes_nothing_and_is_silent() -> None:
    requires("sglang")
    source = metadata.distribution("relax_hpc").read_text("direct_url.json") or "{}"
    if not (Path(sys.prefix) / ".stamp-dev").exists() or json.loads(source).get("url") != ROOT.as_uri():
        pytest.skip("this environment was not made by env/setup.sh dev of this checkout")
    stamps = {path: path.stat().st_mtime_ns for path in Path(sys.prefix).glob(".stamp-*")}
    done = setup("dev", RELAX_VENV=sys.prefix)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path: path.stat().st_mtime_ns for path in Path(sys.prefix).glob(".stamp-*")} == stamps
