"""What an engine needs from its environment on a GPU: a CUDA compiler, and an allocator that the
memory saver takes."""

from __future__ import annotations

import importlib
import json
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from relax_hpc.base.cuda_allocator import expand_segments, without_expandable_segments
from relax_hpc.base.machine import own_environment
from relax_hpc.base.machine.facts import read_facts
from relax_hpc.base.machine.gpu_vendors import Driver
from relax_hpc.ops.checks import machine as machine_checks
from relax_hpc.ops.doctor import gpus
from relax_hpc.ops.doctor.doctor import diagnose
from relax_hpc.roles import __main__ as roles_main
from relax_hpc.rollout.engines.sglang import toolchain
from relax_hpc.rollout.engines.sglang.process import server_environment
from relax_hpc.rollout.engines.sglang.toolchain import compilers, toolkit_variables
from tests.helpers.doctor_helpers import make

GPU = {"layout": "local", "model": {"device": "cuda"}, "rollout": {"engine": {"kind": "sglang"}}}


def program(path: Path, output: str = "") -> Path:
    """An executable file at ``path`` that prints ``output``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{output}'\n")
    path.chmod(0o755)
    return path


@pytest.fixture(name="machine")
def machine_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which `bin` is all of PATH, with a C and a C++ compiler; no CUDA variable, no
    toolkit."""
    for name in ("gcc", "c++"):
        program(tmp_path / "bin" / name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(toolchain, "DEFAULT_TOOLKIT", tmp_path / "usr-local-cuda")
    monkeypatch.setattr(toolchain, "find_spec", lambda name: None)
    return tmp_path


@pytest.fixture(name="wheels")
def wheels_fixture(machine: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Root of the newer of two toolkits among installed wheels, which setup.sh has not completed
    yet."""
    site = machine / "site-packages"
    for name in ("cu9", "cu13"):
        program(
            site / "nvidia" / name / "bin/nvcc", "Cuda compilation tools, release 13.0, V13.0.88"
        )
    (site / "nvidia/cu14/lib").mkdir(parents=True)
    monkeypatch.setattr(toolchain, "find_spec", find_spec)
    monkeypatch.setattr(sys, "path", [str(site)])
    importlib.invalidate_caches()
    return site / "nvidia/cu13"


def test_an_engine_gets_the_toolkit_of_the_wheels_where_there_is_no_other(
    wheels: Path, tmp_path: Path
) -> None:
    assert server_environment(1, tmp_path)["CUDA_HOME"] == str(wheels)


def test_an_engine_keeps_the_toolkit_that_it_would_find(wheels: Path, machine: Path) -> None:
    nvcc = program(machine / "module/bin/nvcc")
    for environment in (
        {"CUDA_HOME": str(machine / "module")},
        {"CUDA_PATH": str(machine / "module")},
        {"PATH": f"{machine / 'bin'}:{machine / 'module/bin'}"},
    ):
        assert toolkit_variables(environment) == {}
        assert compilers({"PATH": str(machine / "bin"), **environment}) == (nvcc, [])
    program(machine / "usr-local-cuda/bin/nvcc")
    assert toolkit_variables({}) == {}


def test_a_variable_that_names_no_toolkit_is_replaced(wheels: Path, machine: Path) -> None:
    assert toolkit_variables({"CUDA_HOME": str(machine / "nothing")}) == {"CUDA_HOME": str(wheels)}
    assert toolkit_variables({"CUDA_HOME": ""}) == {"CUDA_HOME": str(wheels)}


def test_missing_compilers_are_named(machine: Path) -> None:
    nvcc, missing = compilers({"PATH": str(machine / "bin")})
    assert nvcc == machine / "usr-local-cuda/bin/nvcc"
    assert [line.partition(" (")[0] for line in missing] == ["engines: found no nvcc"]
    _, missing = compilers({"PATH": "", "CXX": "g++-99 -O2"})
    assert [line.partition(" (")[0] for line in missing[1:]] == [
        "engines: found no compiler 'g++-99 -O2'",
    ]


def test_the_doctor_names_the_compiler_of_engines(
    wheels: Path, machine: Path, tmp_path: Path
) -> None:
    config = make(tmp_path, GPU)
    missing = [
        finding.text for finding in gpus.check_compilers(config) if finding.severity == "warning"
    ]
    assert [line.partition(",")[0] for line in missing] == [
        f"engines: found no {wheels}/lib64/libcudart.so",
        f"engines: found no {wheels}/lib64/stubs/libcuda.so",
    ]
    (wheels / "lib64/stubs").mkdir(parents=True)
    for name in toolchain.LINKS:
        (wheels / name).touch()
    assert [finding.text for finding in gpus.check_compilers(config)] == [
        f"engines: will compile kernels with {wheels}/bin/nvcc (CUDA 13.0)"
    ]
    config.model.device = "cpu"
    assert list(gpus.check_compilers(config)) == []


def test_the_doctor_reads_the_compiler_and_the_driver(
    machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(machine / "bin/nvcc", "Cuda compilation tools, release 12.4, V12.4.131")
    old = read_facts(with_driver=False)._replace(driver=Driver("550.90.07"))
    for module in (own_environment, machine_checks):
        monkeypatch.setattr(module, "read_facts", lambda **_: old)
    monkeypatch.setattr(own_environment, "own_needs", lambda: {"cuda": "13.0"})
    findings = diagnose(make(tmp_path, GPU), None)
    (driver,) = (finding for finding in findings if "NVIDIA driver" in finding.text)
    assert driver.severity == "error", "this machine would run the roles"
    assert driver.text.startswith("NVIDIA driver 550.90.07 found, 580 or newer needed by CUDA 13.0")
    compiler = f"engines: will compile kernels with {machine}/bin/nvcc (CUDA 12.4)"
    assert [finding.text for finding in findings if "engines" in finding.text] == [compiler]
    submitted = make(tmp_path, GPU | {"layout": "het"})
    (text,) = (finding.text for finding in gpus.check_requirements(submitted))
    assert text == f"{driver.text} (this host; doctor --deep checks the nodes)"
    submitted.model.device = "cpu"
    assert list(gpus.check_requirements(submitted)) == []
    report = gpus.node_report(["gpu"], engines=True)
    assert report == {"problems": [driver.text], "warnings": [], "compiler": compiler}
    json.dumps(report)


def test_the_cuda_of_torch_is_read_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise RuntimeError")
    spec = importlib.util.spec_from_file_location(
        "torch",
        tmp_path / "torch/__init__.py",
        submodule_search_locations=[str(tmp_path / "torch")],
    )
    monkeypatch.setattr(own_environment, "find_spec", lambda name: spec)
    for line, cuda in (
        ("cuda: Optional[str] = '13.0'", "13.0"),
        ("cuda = '12.4'", "12.4"),
        ("cuda = None", ""),
    ):
        (tmp_path / "torch/version.py").write_text(
            f"__version__ = '2.13.0'\ndebug = False\n{line}\nhip = '6.1'\n"
        )
        assert own_environment.torch_releases() == {"cuda": cuda, "rocm": "6.1"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("expandable_segments:True", ""),
        ("max_split_size_mb:128,expandable_segments:True", "max_split_size_mb:128"),
        (
            " expandable_segments : True , garbage_collection_threshold:0.8",
            "garbage_collection_threshold:0.8",
        ),
        ("expandable_segments:False", None),
        ("max_split_size_mb:128", None),
        ("", None),
    ],
)
def test_an_engine_with_the_memory_saver_has_no_expandable_segments(
    before: str, after: str | None
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        environment = {name: before, "HOME": "/home"}
        assert without_expandable_segments(environment) == ({} if after is None else {name: after})
    assert without_expandable_segments({}) == {}


@pytest.mark.parametrize(
    ("environment", "settings"),
    [
        ({}, "expandable_segments:True"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:128"}, "max_split_size_mb:128"),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, None),
    ],
)
def test_a_rank_on_a_gpu_has_expandable_segments_unless_the_site_sets_the_allocator(
    environment: dict[str, str], settings: str | None
) -> None:
    expand_segments(environment)
    assert environment.get("PYTORCH_CUDA_ALLOC_CONF") == settings


@pytest.mark.parametrize(
    ("role", "device", "expands"),
    [("actor", "cuda", True), ("actor", "cpu", False), ("rollout", "cuda", False)],
)
def test_a_rank_sets_its_allocator_before_it_imports_torch(
    role: str, device: str, expands: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = []

    def import_nothing(name: str) -> None:
        settings.append(roles_main.os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
        raise ImportError(name)

    # Set and removed, so that monkeypatch restores what the role sets.
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(roles_main, "import_module", import_nothing)
    config = make(tmp_path, GPU)
    config.model.device = device
    with pytest.raises(ImportError):
        roles_main.import_role(role, config, None)
    assert settings == ["expandable_segments:True" if expands else ""]
