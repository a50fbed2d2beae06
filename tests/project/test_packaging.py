"""Installation: the declared package, its locks, and the scripts under env/."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
LOCKS = sorted((ROOT / "env").glob("requirements-*.txt"))
IMPORT_NAMES = {
    "yaml": "pyyaml",
    "megatron": "megatron-core",
    "PIL": "pillow",
    "markdown_it": "markdown-it-py",
    "decord": "decord2",
    "mlflow": "mlflow-skinny",
    "pynvml": "nvidia-ml-py",
    "nixl_cu12": "nixl-cu12",
    # A dependency of torch for CUDA. relax_hpc.training.models.kernels imports it by its name.
    "triton": "torch",
}
UNLOCKED = ("puzzles", "wandb", "trackio", "mlflow", "nvml")
"""Extras whose packages are not in the lock."""
LIGHT = ["cli.py", "errors.py", "versions.py", "config", "launch", "rendezvous"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(lock: Path) -> dict[str, str]:
    return {
        canonical(name): version
        for name, version in re.findall(r"(?m)^([^#=\s]+)==(\S+)", lock.read_text())
    }


def hashes(lock: Path) -> dict[str, set[str]]:
    """Hashes of each pin."""
    entries = lock.read_text().replace("\\\n", "").splitlines()
    fields = [line.split() for line in entries if not line.startswith("#")]
    return {pin: set(pin_hashes) for pin, *pin_hashes in fields}


def declared(*extras: str) -> set[str]:
    """Packages that relax_hpc requires, alone or with ``extras``."""
    contexts = [{"extra": extra} for extra in ("", *extras)]
    names = set[str]()
    for requirement in map(Requirement, metadata.requires("relax_hpc") or []):
        marker = requirement.marker
        if not marker or any(marker.evaluate(context) for context in contexts):
            names.add(canonical(requirement.name))
    return names


def third_party(path: Path, everywhere: bool) -> Iterator[str]:
    """Packages that a file imports: at its top level only, or in its functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree) if everywhere else tree.body:
        modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        modules += (
            [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        )
        for top in {module.split(".")[0] for module in modules}:
            if top not in sys.stdlib_module_names | {"relax_hpc"}:
                yield canonical(IMPORT_NAMES.get(top, top))


def python_files(*folders: str) -> list[Path]:
    """All Python files in ``folders`` of the checkout."""
    files = list[Path]()
    for folder in folders:
        files += (ROOT / folder).rglob("*.py")
    return files


def other_imports(files: list[Path], allowed: set[str], everywhere: bool) -> list[str]:
    """`file: package` of each import of a package that is not ``allowed``."""
    lines = list[str]()
    for file in files:
        names = set(third_party(file, everywhere)) - allowed
        lines += [f"{file.relative_to(ROOT)}: {name}" for name in names]
    return sorted(lines)


def test_every_import_is_declared() -> None:
    files = python_files("relax_hpc", "examples")
    missing = other_imports(files, declared("all", *UNLOCKED), everywhere=True)
    assert not missing, f"add to setup.py: {missing}"


def test_light_modules_import_only_the_base_requirements() -> None:
    files = list[Path]()
    for path in (ROOT / "relax_hpc" / name for name in LIGHT):
        files += [path] if path.is_file() else path.rglob("*.py")
    heavy = other_imports(files, declared(), everywhere=False)
    assert not heavy, f"import these inside the function that needs them: {heavy}"


def test_every_folder_with_code_is_a_package() -> None:
    folders = {path.parent for path in python_files("relax_hpc", "examples")}
    assert not [str(folder) for folder in folders if not (folder / "__init__.py").exists()]


def test_the_wheel_has_the_examples_instead_of_their_placeholder(
    tmp_path: Path,
) -> None:
    for name in (
        "setup.py",
        "pyproject.toml",
        "LICENSE",
        "relax_hpc",
        "slurm",
        "examples",
        "configs",
    ):
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        is_folder = (ROOT / name).is_dir()
        copy = partial(shutil.copytree, ignore=ignored) if is_folder else shutil.copy
        copy(ROOT / name, tmp_path / name)
    build = (
        "from setuptools import build_meta; import sys; print(build_meta.build_wheel(sys.argv[1]))"
    )
    command = [sys.executable, "-I", "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(tmp_path / done.stdout.splitlines()[-1]) as wheel:
        shipped = {
            name: wheel.read(name)
            for name in wheel.namelist()
            if name.startswith("relax_hpc/examples/")
        }
    sources = (ROOT / "examples").rglob("*.py")
    assert shipped == {f"relax_hpc/{path.relative_to(ROOT)}": path.read_bytes() for path in sources}


def test_console_script_is_declared() -> None:
    scripts = {
        e.name: e.value
        for e in metadata.distribution("relax_hpc").entry_points
        if e.group == "console_scripts"
    }
    assert scripts == {"relax-hpc": "relax_hpc.commands.program:main"}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_lock_is_sorted_pins_with_hashes_and_nothing_else(lock: Path) -> None:
    text = re.sub(r"(?m)^#.*\n", "", lock.read_text())
    pin = r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+(?: \\\n    --hash=sha256:[0-9a-f]{64})+\n"
    assert re.fullmatch(f"(?:{pin})+", text), "env/hashes.py writes hashes"
    names = list(pins(lock))
    assert names == sorted(names) and len(names) == text.count("==")


def test_the_libraries_of_torchs_cuda_build_are_those_of_the_gpu_lock() -> None:
    """In PyPI's torch a CPU installation loads the same libraries as a GPU installation."""
    cuda, gpu = (hashes(ROOT / f"env/requirements-{name}.txt") for name in ("cuda", "gpu"))
    assert cuda.items() <= gpu.items()


def test_the_gpu_lock_lists_no_cpu_build_of_torch() -> None:
    locks = [hashes(ROOT / f"env/requirements-{name}.txt") for name in ("cpu", "gpu")]
    cpu, gpu = (
        next(entries for pin, entries in lock.items() if pin.startswith("torch=="))
        for lock in locks
    )
    assert gpu < cpu, "the CPU lock must also list the CPU build that CI installs"


@pytest.mark.parametrize("lock", ["cpu", "gpu"])
def test_locks_satisfy_the_declared_requirements(lock: str) -> None:
    have = pins(ROOT / f"env/requirements-{lock}.txt") | pins(ROOT / "env/requirements-dev.txt")
    wanted = [Requirement(r) for r in metadata.requires("relax_hpc") or []]
    unlocked = [f'extra == "{extra}"' for extra in ("rdma", "all", *UNLOCKED)]
    wanted = [r for r in wanted if not any(extra in str(r) for extra in unlocked)]
    assert not [
        str(r)
        for r in wanted
        if not r.specifier.contains(have.get(canonical(r.name), "0"), prereleases=True)
    ]


def test_gpu_and_cpu_locks_agree_on_what_defines_results() -> None:
    cpu, gpu = (pins(ROOT / f"env/requirements-{name}.txt") for name in ("cpu", "gpu"))
    for name in (
        "torch",
        "sglang",
        "megatron-core",
        "transformers",
        "tokenizers",
        "mpi4py",
        "mpich",
        "xgrammar",
    ):
        assert cpu[name] == gpu[name], name


def verify(site: Path, lock: Path) -> list[str]:
    """Pins that env/verify.py reports as missing from the site-packages folder ``site``."""
    code = (
        "import runpy, sys, sysconfig; site = sys.argv[1]; sysconfig.get_path = lambda *a: site; "
        "main = runpy.run_path(sys.argv[2])['main']; main(sys.argv[3:])"
    )
    command = [sys.executable, "-I", "-c", code, str(site), str(ROOT / "env/verify.py"), str(lock)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=30
    ).stdout.splitlines()


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
    lock.write_text(
        "# a comment\n"
        + "".join(
            f"{name}==1.0 \\\n    --hash=sha256:1 \\\n    --hash=sha256:2\n" for name in names
        )
    )
    assert verify(site, lock) == [
        f"{name}==1.0 --hash=sha256:1 --hash=sha256:2" for name in names[2:]
    ]
    assert not (site / "unfinished-1.0.dist-info").exists(), (
        "pip cannot replace a package that has no RECORD"
    )


@pytest.mark.parametrize(
    ("text", "missing"), [("x = 1\n", []), ("x = 1 \n", []), ("x", ["one==1.0", "two==1.0"])]
)
def test_verify_accepts_a_shared_file_with_the_size_of_either_package(
    tmp_path: Path, text: str, missing: list[str]
) -> None:
    site, lock = tmp_path / "site", tmp_path / "lock.txt"
    for name, size in (("one", 6), ("two", 7)):
        make_package(site, name, "1.0")
        with (site / f"{name}-1.0.dist-info/RECORD").open("a") as record:
            record.write(
                f"tools/../build_backend.py,,{size}\n"
                if name == "two"
                else f"build_backend.py,,{size}\n"
            )
    (site / "tools").mkdir()
    (site / "build_backend.py").write_text(text)
    lock.write_text("one==1.0\ntwo==1.0\n")
    assert verify(site, lock) == missing


def wheels_of(version: str, *tags: str) -> dict[str, str]:
    return {
        f"tiny-{version}-{tag}.whl": hashlib.sha256(f"{version}{tag}".encode()).hexdigest()
        for tag in tags
    }


@pytest.fixture
def index() -> Iterator[str]:
    """Address of a package index with one package, whose file names are like real ones."""
    linux, mac = "manylinux_2_17_x86_64.manylinux2014_x86_64", "macosx_11_0_arm64"
    files = wheels_of(
        "1",
        f"cp311-cp311-{linux}",
        f"cp312-cp312-{linux}",
        f"cp313-cp313-{linux}",
        f"cp311-cp311-{mac}",
        f"cp311-cp311-{linux.replace('x86_64', 'aarch64')}",
    )
    files |= (
        wheels_of("2", f"cp310-abi3-{linux}")
        | wheels_of("3", f"cp311-cp311-{linux}")
        | wheels_of("4", f"cp311-cp311-{linux}", f"cp312-cp312-{linux}")
        | {"tiny-1.tar.gz": "0" * 64}
    )
    # Some projects build wheels for a Python that they do not support.
    requires = {name: ">=3.12" for name in files if name.startswith("tiny-4")}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/simple/tiny/" else 404)
            self.end_headers()
            listing = [
                {
                    "filename": name,
                    "hashes": {"sha256": sha256},
                    "requires-python": requires.get(name),
                }
                for name, sha256 in files.items()
            ]
            self.wfile.write(json.dumps({"files": listing}).encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def write_hashes(lock: Path, index: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "env/hashes.py"), str(lock)]
    env = {
        **os.environ,
        "PIP_INDEX_URL": index,
        "NO_PROXY": "127.0.0.1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


def test_hashes_are_those_of_all_wheels_for_both_pythons(tmp_path: Path, index: str) -> None:
    lock = tmp_path / "lock.txt"
    lock.write_text("# a comment of the lock\ntiny==1\n")
    assert write_hashes(lock, index).returncode == 0
    linux = "manylinux_2_17_x86_64.manylinux2014_x86_64"
    both = (linux, linux.replace("x86_64", "aarch64"))
    public = wheels_of("1", *(f"cp311-cp311-{tag}" for tag in both), f"cp312-cp312-{linux}")
    assert hashes(lock) == {"tiny==1": {f"--hash=sha256:{sha256}" for sha256 in public.values()}}
    assert lock.read_text().startswith("# a comment of the lock\ntiny==1 \\\n    --hash=")
    own_hash = f"--hash=sha256:{'f' * 64}"
    lock.write_text(f"tiny==2 {own_hash}\n")
    assert write_hashes(lock, index).returncode == 0
    assert own_hash in hashes(lock)["tiny==2"] and len(hashes(lock)["tiny==2"]) == 2
    lock.write_text("absent==1\ntiny==3\ntiny==4\n")
    done = write_hashes(lock, index)
    problems = [
        "absent==1: no wheel for Python 3.11, 3.12",
        "tiny==3: no wheel for Python 3.12",
        "tiny==4: no wheel for Python 3.11",
    ]
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        [f"{lock}: {problem}" for problem in problems],
    )
    assert lock.read_text() == "absent==1\ntiny==3\ntiny==4\n"


@pytest.mark.parametrize("python", ["3.11", "3.12"])
@pytest.mark.parametrize("architecture", ["x86_64", "aarch64"])
@pytest.mark.parametrize("lock", ["cpu", "cuda", "gpu"])
def test_lock_resolves_with_binaries_only(
    lock: str, architecture: str, python: str, tmp_path: Path
) -> None:
    """pip's dry run with hashes finds a wheel of each pin, as a login node without a driver and a
    compiler needs."""
    if not os.environ.get("RELAX_WHOLE"):
        pytest.skip(
            "asks the package index for every pin, a minute a lock: RELAX_WHOLE=1 (env/test.sh "
            "--all)"
        )
    subprocess.run([sys.executable, "-m", "venv", tmp_path], check=True, timeout=120)
    pip = [tmp_path / "bin/python", "-m", "pip", "install", "-q"]
    # Debian's own pip downloads whole files for a dry run; a later one reads their metadata.
    subprocess.run([*pip, "-U", "pip"], check=True, timeout=300)
    path = ROOT / f"env/requirements-{lock}.txt"
    names = tmp_path / "lock.txt"
    names.write_text("".join(f"{pin}\n" for pin in hashes(path)))
    options = [
        "--dry-run",
        "--only-binary=:all:",
        "--no-deps",
        "--ignore-installed",
        "--use-feature=fast-deps",
        f"--platform=linux_{architecture}",
    ]
    # The oldest glibc for which all pins have wheels.
    options += [f"--platform=manylinux_2_{minor}_{architecture}" for minor in range(34, 4, -1)]
    options += [f"--platform=manylinux{year}_{architecture}" for year in (2014, 2010, 1)]
    options += ["--python-version", python, "--report", tmp_path / "report", "-r", names]
    done = subprocess.run([*pip, *options], capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    installed = json.loads((tmp_path / "report").read_text())["install"]
    assert len(installed) == len(pins(names))
    locked = set().union(*hashes(path).values())
    for package in installed:
        sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
        assert f"--hash=sha256:{sha256}" in locked, package["download_info"]["url"]


def files_of_the_image() -> list[tuple[str, str]]:
    """Source and target of each copy in the Apptainer definition."""
    section = (ROOT / "env/relax_hpc.def").read_text().split("%files\n")[1].split("\n\n")[0]
    return [(source, target) for source, target in (line.split() for line in section.splitlines())]


def test_the_image_has_all_files_that_the_build_needs(tmp_path: Path) -> None:
    """The test builds the package from exactly the files of the image, as `setup.sh` does there."""
    home = Path("/opt/relax_hpc")
    for source, target in files_of_the_image():
        at = tmp_path / Path(target).relative_to(home)
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(ROOT / source, at, ignore=ignored) if (
            ROOT / source
        ).is_dir() else shutil.copy(ROOT / source, at)
    build = "from setuptools import build_meta; import sys; build_meta.build_editable(sys.argv[1])"
    command = [sys.executable, "-I", "-c", build, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.glob("relax_hpc-*.whl"))
    script = (ROOT / "env/relax_hpc.def").read_text()
    assert {str(path) for path in map(Path, re.findall(r"/opt/relax_hpc/(env/\S+)", script))} == {
        "env/setup.sh"
    }
    assert (tmp_path / "env/setup.sh").exists() and all(
        (tmp_path / "env" / lock.name).exists() for lock in LOCKS
    )
