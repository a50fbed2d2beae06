"""env/setup.sh: the Python and the builds that it selects, its output, and a second call."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.requirements import requires

pytestmark = pytest.mark.run

ROOT = Path(__file__).resolve().parents[2]
BACKEND = """
import os, shutil

def build_editable(directory, *_):
    open(os.environ.get("GATE", os.devnull)).read()
    return os.path.basename(shutil.copy(os.environ["PACKAGE"], directory))
"""
"""Backend that builds the package of the scratch checkout after the test has opened the gate."""


def environment(**env: str) -> dict[str, str]:
    return {
        **os.environ,
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
        "PIP_CONFIG_FILE": os.devnull,
        **env,
    }


def setup(*arguments: str, root: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "env/setup.sh"), *arguments]
    return subprocess.run(
        command, env=environment(**env), capture_output=True, text=True, timeout=120
    )


def wheel(folder: Path, name: str, version: str, needs: str = "", shared: str = "") -> str:
    """Write a wheel with one module, and return its pin for a lock. ``shared``: text of its file
    `build_backend.py`."""
    path, info = folder / f"{name}-{version}-py3-none-any.whl", f"{name}-{version}.dist-info"
    description = (
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        + f"Requires-Dist: {needs}\n" * bool(needs)
    )
    with zipfile.ZipFile(path, "w") as file:
        file.writestr(f"{name}.py", f"version = {version!r}\n")
        file.writestr(f"{info}/METADATA", description)
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        record = f"{name}.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n"
        if shared:
            file.writestr("build_backend.py", shared)
            record += f"build_backend.py,,{len(shared)}\n"
        file.writestr(f"{info}/RECORD", record)
    return f"{name}=={version} --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"


class Checkout:
    """A checkout with one small package in each lock. A folder of wheels replaces the index."""

    def __init__(self, root: Path) -> None:
        self.root, self.wheels = root / "checkout", root / "wheels"
        (self.root / "env").mkdir(parents=True)
        self.wheels.mkdir()
        for name in ("setup.sh", "verify.py"):
            shutil.copy(ROOT / "env" / name, self.root / "env")
        machine = Path("relax_hpc/base/machine")
        shutil.copytree(ROOT / machine, self.root / machine)
        for name in ("cpu", "gpu"):
            path = f"env/requirements-{name}.json"
            needs = json.loads((ROOT / path).read_text())
            for wheels in needs["architectures"].values():
                wheels["installed_bytes"] = wheels["download_bytes"] = 1
            (self.root / path).write_text(json.dumps(needs))
        (self.root / "backend.py").write_text(BACKEND)
        system = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        (self.root / "pyproject.toml").write_text(system)
        (self.root / "setup.py").touch()
        self.first_output = ""  # standard error of the first call
        wheel(root, "relax_hpc", "1")
        self.lock("cpu", wheel(self.wheels, "torch", "1"))
        self.lock("cuda", wheel(self.wheels, "cuda_toolkit", "1"))
        package = root / "relax_hpc-1-py3-none-any.whl"
        self.env = {
            "PIP_FIND_LINKS": str(self.wheels),
            "PACKAGE": str(package),
            "PATH": f"{root}:{os.environ['PATH']}",
        }
        # A version manager puts its Python first on PATH. It works, but is not the system's.
        (root / "python3.11").symlink_to(sys.executable)

    def lock(self, name: str, pins: str) -> None:
        (self.root / f"env/requirements-{name}.txt").write_text(pins)

    def setup(self, **env: str) -> subprocess.CompletedProcess[str]:
        return setup(root=self.root, **self.env, **env)

    def installed(self) -> dict[str, str]:
        """Version of each installed package by its name."""
        site = next((self.root / ".venv/lib").glob("python3*/site-packages"))
        packages = metadata.distributions(path=[str(site)])
        return {package.metadata["Name"].replace("_", "-"): package.version for package in packages}


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose environment is installed."""
    checkout = Checkout(tmp_path_factory.mktemp("setup"))
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    checkout.first_output = done.stderr
    return checkout


def test_setup_prefers_the_systems_python_and_names_it(checkout: Checkout) -> None:
    system = next(
        (
            path
            for path in map(Path, ("/usr/bin/python3.11", "/usr/bin/python3.12"))
            if path.exists()
        ),
        None,
    )
    if (
        system is None
        or subprocess.run([system, "-c", "import ensurepip, venv"], check=False).returncode
    ):
        pytest.skip("the system has no Python 3.11 or 3.12 that makes environments")
    assert f"with {system}, Python 3.1" in checkout.first_output
    assert f"executable = {system}" in (checkout.root / ".venv/pyvenv.cfg").read_text()
    assert checkout.installed().items() >= {"torch": "1", "relax-hpc": "1"}.items()


def test_a_build_that_the_lock_does_not_list_is_refused_unless_allowed(
    checkout: Checkout,
) -> None:
    listed = wheel(checkout.wheels, "torch", "2")
    other = wheel(checkout.wheels, "torch", "2", needs="cuda-toolkit; python_version > '2'")
    checkout.lock("cpu", listed)
    done = checkout.setup()
    assert done.returncode == 1 and "DO NOT MATCH THE HASHES" in done.stderr
    assert (
        "setup: a build that the lock does not list was refused" in done.stderr
        and "RELAX_UNHASHED=1" in done.stderr
    )
    assert checkout.installed()["torch"] == "1"
    done = checkout.setup(RELAX_UNHASHED="1")
    assert (
        done.returncode == 0
        and "RELAX_UNHASHED=1: builds are not compared with the lock" in done.stderr
    )
    assert checkout.installed()["torch"] == "2" and checkout.installed()["cuda-toolkit"] == "1"
    # Installed packages stay: pip compares hashes only of packages that it installs.
    checkout.lock("cpu", other)
    assert checkout.setup().returncode == 0
    assert checkout.setup().stderr == ""


@pytest.mark.parametrize("version", ["3", "4"])
def test_a_cpu_build_of_torch_is_preferred_if_it_is_listed(
    checkout: Checkout, tmp_path: Path, version: str
) -> None:
    """pip prefers files whose hashes are in the lock. An index gives hashes of its files, a folder
    does not."""
    (tmp_path / "torch").mkdir()
    public, cpu_build = (
        wheel(tmp_path, "torch", version),
        wheel(checkout.wheels, "torch", f"{version}+cpu"),
    )
    sha256 = public.split("sha256:")[1].strip()
    page = f'<a href="../torch-{version}-py3-none-any.whl#sha256={sha256}">torch</a>'
    (tmp_path / "torch/index.html").write_text(page)
    checkout.lock("cpu", public if version == "3" else f"{public.strip()} {cpu_build.split()[1]}\n")
    done = checkout.setup(PIP_NO_INDEX="0", PIP_INDEX_URL=tmp_path.as_uri(), PIP_EXTRA_INDEX_URL="")
    assert done.returncode == 0, done.stderr
    assert ("does not list this site's CPU build of torch" in done.stderr) == (version == "3")
    assert checkout.installed()["torch"] == {"3": "3", "4": "4+cpu"}[version]


def test_packages_that_ship_one_file_with_other_contents_can_be_installed(
    checkout: Checkout,
) -> None:
    """torch-c-dlpack-ext and flashinfer-python of the GPU lock share a file. pip keeps the file of
    the last package."""
    texts = {"first": "x = 1\n", "second": "x = 1  # longer\n"}
    pins = [wheel(checkout.wheels, name, "1", shared=text) for name, text in texts.items()]
    checkout.lock("cpu", wheel(checkout.wheels, "torch", "5") + "".join(pins))
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    assert checkout.installed().items() >= {"first": "1", "second": "1"}.items()
    shared = next((checkout.root / ".venv/lib").glob("python3*/site-packages")) / "build_backend.py"
    assert shared.read_text() in texts.values()
    assert checkout.setup().stderr == "", "a second call changes nothing"
    (checkout.root / ".venv/.stamp-cpu").unlink()
    shared.write_text("x")
    assert "installing 2 packages" in checkout.setup().stderr, "a damaged file is repaired"
    assert shared.read_text() in texts.values()


def test_kernels_can_be_linked_with_the_cuda_toolkit_of_wheels(checkout: Checkout) -> None:
    """SGLang needs libcudart.so, lib64 and libcuda.so. The wheels have only a libcudart.so.13."""
    requires("gcc")
    folder = "nvidia/cu13"
    runtime = _compiled(
        checkout.root / "libcudart.so.13", "int cudaFree(void *p) { return 0; }", "-shared"
    )
    path, info = checkout.wheels / "nvcc-1-py3-none-any.whl", "nvcc-1.dist-info"
    with zipfile.ZipFile(path, "w") as file:
        program = zipfile.ZipInfo(f"{folder}/bin/nvcc")
        program.external_attr = 0o100755 << 16
        file.writestr(program, "#!/bin/sh\n")
        file.write(runtime, f"{folder}/lib/libcudart.so.13")
        file.writestr(f"{folder}/include/cuda.h", "CUresult CUDAAPI cuInit(unsigned int Flags);\n")
        file.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: nvcc\nVersion: 1\n")
        file.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        paths = ("bin/nvcc", "lib/libcudart.so.13", "include/cuda.h")
        names = (*(f"{folder}/{path}" for path in paths), f"{info}/METADATA", f"{info}/WHEEL")
        file.writestr(
            f"{info}/RECORD", "".join(f"{name},,\n" for name in (*names, f"{info}/RECORD"))
        )
    pin = f"nvcc==1 --hash=sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}\n"
    checkout.lock("cpu", wheel(checkout.wheels, "torch", "6") + pin)
    done = checkout.setup()
    assert done.returncode == 0, done.stderr
    home = next((checkout.root / ".venv/lib").glob("python3*/site-packages")) / folder
    # As SGLang's toolchain.py and flashinfer link.
    kernel = (
        "int cudaFree(void *p); int cuInit(unsigned flags); int load() { return cudaFree(0) + "
        "cuInit(0); }"
    )
    options = [
        "-shared",
        f"-L{home}/lib64",
        f"-L{home}/lib64/stubs",
        "-Wl,--as-needed",
        "-lcudart",
        "-lcuda",
    ]
    needed = subprocess.run(
        ["readelf", "-d", _compiled(checkout.root / "kernel.so", kernel, *options)],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert "[libcuda.so.1]" in needed.stdout, (
        "the kernel must load the driver's library of the node"
    )
    assert checkout.setup().stderr == "", "a second call changes nothing"
    (home / "lib/stubs/libcuda.so").unlink()
    assert "setup: done" in checkout.setup().stderr and (home / "lib64/stubs/libcuda.so").exists()


def _compiled(path: Path, source: str, *options: str) -> Path:
    command = ["gcc", "-x", "c", "-fPIC", "-", "-o", str(path), *options]
    subprocess.run(command, input=source, text=True, check=True, timeout=60)
    return path


@pytest.mark.parametrize(
    ("version", "settings", "code"),
    [("2.28", {}, 78), ("2.28", {"RELAX_UNCHECKED": "1"}, 0), ("2.34", {}, 0)],
)
def test_setup_refuses_a_glibc_older_than_the_wheels_need(
    checkout: Checkout, version: str, settings: dict[str, str], code: int
) -> None:
    facts = checkout.root / "facts.json"
    facts.write_text(json.dumps({"libc": f"glibc {version}", "architecture": "x86_64"}))
    log = checkout.root / ".venv/install.log"
    (checkout.root / ".venv/.stamp-cpu").unlink(missing_ok=True)
    before = log.read_bytes()
    done = checkout.setup(RELAX_FACTS=str(facts), **settings)
    assert done.returncode == code, done.stderr
    line = f"setup: glibc {version} found, 2.34 needed by sglang 0.5.21: use site.container"
    assert (line in done.stderr) == (version == "2.28")
    kept = checkout.root / ".venv/machine_facts.json"
    assert kept.exists() == (code == 0), "doctor and submit compare the nodes with it"
    kept.unlink(missing_ok=True)
    if code:
        assert "nothing was downloaded" in done.stderr and log.read_bytes() == before


def test_the_environment_has_the_minimum_requirements_of_its_lock(checkout: Checkout) -> None:
    assert checkout.setup().returncode == 0
    kept = checkout.root / ".venv/minimum_requirements.json"
    assert kept.read_bytes() == (checkout.root / "env/requirements-cpu.json").read_bytes()
    kept.unlink()
    assert "setup: done" in checkout.setup().stderr and kept.exists()


@pytest.mark.parametrize("terminal", [False, True], ids=["log", "terminal"])
def test_a_long_step_shows_its_seconds(checkout: Checkout, terminal: bool) -> None:
    """The build of the package waits until the output shows the seconds of the step."""
    gate = checkout.root / "gate"
    gate.unlink(missing_ok=True)
    os.mkfifo(gate)
    (checkout.root / ".venv/.stamp-package").unlink()
    reading, writing = pty.openpty() if terminal else os.pipe()
    env = environment(**checkout.env, GATE=str(gate), RELAX_SETUP_SAY_S="1")
    started = subprocess.Popen(
        ["bash", str(checkout.root / "env/setup.sh")], env=env, stderr=writing
    )
    os.close(writing)
    step, output = f"setup: installing relax_hpc from {checkout.root}", b""
    while not re.search(rf"{step}: \d+ s".encode(), output):
        assert (
            select.select([reading], [], [], 60)[0]
            and started.poll() is None
            and len(output) < 1000
        ), output
        output += os.read(reading, 4096)
    gate.write_text("open")
    assert started.wait(timeout=60) == 0
    os.close(reading)
    assert (b"\r\x1b[K" in output) == terminal


def test_setup_names_the_versions_of_python_that_it_accepts(tmp_path: Path) -> None:
    done = setup(RELAX_VENV=str(tmp_path / "venv"), RELAX_PYTHON="/bin/false")
    assert (
        done.returncode == 78
        and "no Python 3.11 or 3.12" in done.stderr
        and "/bin/false" in done.stderr
    )
    assert not (tmp_path / "venv.lock").is_symlink(), "a failed call must not leave its lock"


def test_setup_refuses_an_unknown_argument(tmp_path: Path) -> None:
    done = setup("cuda", RELAX_VENV=str(tmp_path / "venv"))
    assert done.returncode == 1 and "cuda" in done.stderr and "gpu" in done.stderr


def test_setup_waits_for_a_running_call_and_replaces_a_dead_one(tmp_path: Path) -> None:
    lock, host = tmp_path / "venv.lock", os.uname().nodename
    env = {
        "RELAX_VENV": str(tmp_path / "venv"),
        "RELAX_PYTHON": "/bin/false",
        "RELAX_SETUP_WAIT_S": "1",
    }
    lock.symlink_to(f"{host}:{os.getpid()}")
    waited = setup(**env)
    assert (
        waited.returncode == 1
        and f"{host}:{os.getpid()}" in waited.stderr
        and "still holds" in waited.stderr
    )
    lock.unlink()
    ended = subprocess.Popen(["/bin/true"])
    ended.wait(timeout=60)
    lock.symlink_to(f"{host}:{ended.pid}")
    assert "no Python 3.11 or 3.12" in setup(**env).stderr


def test_second_setup_changes_nothing_and_is_silent() -> None:
    requires("sglang")
    source = metadata.distribution("relax_hpc").read_text("direct_url.json") or "{}"
    if (
        not (Path(sys.prefix) / ".stamp-dev").exists()
        or json.loads(source).get("url") != ROOT.as_uri()
    ):
        pytest.skip("this environment was not made by env/setup.sh dev of this checkout")
    stamps = {path: path.stat().st_mtime_ns for path in Path(sys.prefix).glob(".stamp-*")}
    done = setup("dev", RELAX_VENV=sys.prefix)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert {path: path.stat().st_mtime_ns for path in Path(sys.prefix).glob(".stamp-*")} == stamps
