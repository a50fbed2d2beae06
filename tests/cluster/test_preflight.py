"""What a node finds out about itself, and the record of nodes that keep failing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.machine import own_environment
from relax_hpc.base.machine.facts import Facts
from relax_hpc.base.machine.gpu_vendors import Driver
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm import node_probe
from relax_hpc.cluster.slurm.node_probe import BadNodes, check_node, excluded_nodes, fabric_problems


@pytest.fixture
def run(run_dir: Path) -> RunDir:
    return RunDir(run_dir)


def nvidia_smi(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int = 0) -> None:
    """An nvidia-smi that prints `text`, on PATH."""
    put_program(folder, monkeypatch, "nvidia-smi", text, code)


def put_program(
    folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, code: int = 0
) -> None:
    """A program that prints ``text``, on PATH."""
    folder.mkdir(exist_ok=True)
    (folder / "answer").write_text(text)
    program = folder / name
    program.write_text(f"#!/bin/sh\n/bin/cat '{folder}/answer'\nexit {code}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("CC", "/bin/sh")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_a_good_node_has_no_problems(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "node7")
    monkeypatch.setattr(node_probe, "FABRIC", run.root / "nothing")
    report = check_node(run, min_memory_gib=0.01, interface="lo")
    assert report.ok and report.node == "node7" and report.memory_gib > 0
    assert json.loads(report.line())["ok"] is True
    assert not list(run.root.iterdir())


def test_the_command_prints_problems(run: RunDir) -> None:
    """The command prints one line. Its exit code is 0 for a good node, and 75 otherwise."""
    command = [sys.executable, "-m", "relax_hpc.cluster.slurm.node_probe", f"--run_dir={run.root}"]
    for extra, code in (
        (["--interface=lo"], 0),
        (["--min_memory_gib=1e9", "--interface=ib77"], 75),
    ):
        process = subprocess.run([*command, *extra], capture_output=True, text=True, timeout=60)
        assert process.returncode == code, process.stderr
        (line,) = process.stdout.splitlines()
        assert len(json.loads(line)["problems"]) == (2 if code else 0)


def test_a_node_without_needs_of_the_environment_has_problems(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {
        "pythons": ["3.11", "3.12"],
        "architectures": {"x86_64": {"glibc": "2.34", "glibc_package": "sglang 0.5.21"}},
    }
    old = Facts(system="Linux", architecture="x86_64", libc="glibc 2.28", c_compiler="gcc")
    monkeypatch.setattr(own_environment, "read_facts", lambda **_: old)
    monkeypatch.setattr(own_environment, "load_needs", lambda: needs)
    report = check_node(run)
    assert report.problems == [
        "glibc 2.28 found, 2.34 needed by sglang 0.5.21: use site.container (env/relax_hpc.def)"
    ]
    assert not report.meets_requirements and "meets_requirements" in json.loads(report.line())
    assert report.permanent_problems == report.problems
    assert node_probe.main([f"--run_dir={run.root}"]) == 78
    old = old._replace(libc="glibc 2.34", user_namespaces="user.max_user_namespaces is 0")
    monkeypatch.setattr(own_environment, "read_facts", lambda **_: old)
    assert check_node(run).ok
    silent = old._replace(driver=Driver(answers=False), user_namespaces="")
    monkeypatch.setattr(own_environment, "read_facts", lambda **_: silent)
    report = check_node(run, gpus=8)
    (problem,) = report.problems
    assert report.permanent_problems == [] and not report.meets_requirements, "other nodes may do"
    assert problem.startswith("NVIDIA driver without an answer found"), "nvidia-smi is not asked"
    monkeypatch.setattr(own_environment, "read_facts", lambda **_: old)
    (problem,) = check_node(run, programs=True).problems
    assert problem.startswith("user namespaces forbidden (user.max_user_namespaces is 0) found")


def test_too_little_memory(run: RunDir) -> None:
    free = psutil.virtual_memory().total / 2**30
    assert check_node(run, min_memory_gib=2 * free).problems[0].startswith("memory: found")


def test_no_shared_memory(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_probe, "SHM", run.root / "nothing")
    assert "nothing: found 0 MiB free" in check_node(run).problems[0]


GPU = "{n}, GPU-{n}{n}, 80000, {used}\n"


def test_too_few_gpus_are_a_problem(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, "".join(GPU.format(n=n, used=4) for n in range(4)))
    assert check_node(run, gpus=4).gpus == 4
    assert check_node(run, gpus=4).ok
    assert "GPUs: found 4, needed: 8" in check_node(run, gpus=8).problems[0]


def test_a_gpu_that_is_in_use(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, GPU.format(n=0, used=4) + GPU.format(n=1, used=60000))
    assert (
        "GPU 1: found 75% of its memory in use, allowed: 10%" in check_node(run, gpus=2).problems[0]
    )
    assert check_node(run, gpus=2, max_gpu_used_share=0.8).ok
    # Another job's, where Slurm does not hide them.
    for names in ("0", "GPU-00"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
        assert check_node(run, gpus=1).ok


@pytest.mark.parametrize(
    ("text", "code"), [("No devices were found\n", 6), ("what?\n", 0), ("0, G, [N/A], 3\n", 0)]
)
def test_a_broken_nvidia_smi(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, code: int
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, text, code)
    problem = check_node(run, gpus=1).problems[0]
    reason = "failed with exit code 6 (No devices were found)" if code else f"printed {text[:4]!r}"
    assert problem.startswith(f"GPUs: nvidia-smi {reason.rstrip(chr(39))}"), problem
    assert node_probe.main([f"--run_dir={run.root}", "--gpus=1"]) == 78


@pytest.mark.parametrize(
    ("variable", "value", "wanted", "is_exact", "count"),
    [
        # Each task has one GPU: --gpu-bind=single:1.
        ("CUDA_VISIBLE_DEVICES", "0", 4, False, 1),
        ("CUDA_VISIBLE_DEVICES", "", 1, False, 0),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3", 2, True, 4),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3", 2, False, None),
        ("CUDA_VISIBLE_DEVICES", "0,1,2,3", 4, True, None),
        # Of another vendor.
        ("ROCR_VISIBLE_DEVICES", "0", 4, True, None),
    ],
)
def test_another_number_of_visible_gpus_is_refused_by_name(
    run: RunDir,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    wanted: int,
    is_exact: bool,
    count: int | None,
) -> None:
    nvidia_smi(tmp_path / "bin", monkeypatch, "".join(GPU.format(n=n, used=4) for n in range(4)))
    monkeypatch.setenv(variable, value)
    report = check_node(run, gpus=wanted, group="actor", exact_gpus=is_exact)
    assert report.ok == (count is None), report.problems
    if count is not None:
        assert (
            report.problems
            == report.permanent_problems
            == [
                f"{variable}: found {value!r} ({count} GPUs), needed: {wanted} "
                "(groups.actor.resources.gpus_per_node); remove options that divide GPUs "
                "(gpus-per-task, gpu-bind) from srun_options, and the variable from site.setup and env"
            ]
        )
        arguments = [f"--run_dir={run.root}", f"--gpus={wanted}", "--exact_gpus"]
        assert node_probe.main(arguments) == 78


def test_a_node_with_rocm(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory in use is that of github.com/marimo-team/marimo/issues/9237, 27 of 21,458 MB."""
    cards = {}
    for number in range(2):
        cards[f"card{number}"] = {
            "VRAM Total Memory (B)": "21458059264",
            "VRAM Total Used Memory (B)": str(27856896 * (1 + 99 * number)),
            "Unique ID": f"0x{number:016x}",
        }
    put_program(tmp_path / "bin", monkeypatch, "rocm-smi", json.dumps(cards))
    (problem,) = check_node(run, gpus=2, gpu_vendor="rocm").problems
    assert problem.startswith("GPU 1: found 13% of its memory in use, allowed: 10% (site.max_gpu_")
    assert problem.endswith("a process was left over (rocm-smi)")
    monkeypatch.setenv("ROCR_VISIBLE_DEVICES", "GPU-0000000000000000")
    report = check_node(run, gpus=1, gpu_vendor="rocm", exact_gpus=True)
    assert report.ok and report.gpus == 1


def test_no_nvidia_smi(run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "/bin/sh")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert "GPUs: found no nvidia-smi" in check_node(run, gpus=1).problems[0]


def port(folder: Path, device: str, state: str, physical: str) -> None:
    port_folder = folder / device / "ports" / "1"
    port_folder.mkdir(parents=True)
    (port_folder / "state").write_text(f"{state}\n")
    (port_folder / "phys_state").write_text(f"{physical}\n")


def test_inactive_ports_of_the_fabric_are_a_problem(tmp_path: Path) -> None:
    assert fabric_problems(tmp_path / "none") == []
    port(tmp_path, "mlx5_0", "1: DOWN", "3: Disabled")
    assert "found no active port among 1" in fabric_problems(tmp_path)[0]
    port(tmp_path, "mlx5_1", "4: ACTIVE", "5: LinkUp")
    # A port without a cable is not a problem.
    assert fabric_problems(tmp_path) == []
    port(tmp_path, "mlx5_2", "2: INIT", "5: LinkUp")
    assert "mlx5_2 port 1 2: INIT" in fabric_problems(tmp_path)[0]


def test_a_missing_run_directory_is_a_problem(tmp_path: Path) -> None:
    assert "run_dir: cannot write in" in check_node(RunDir(tmp_path / "nothing")).problems[0]
    (tmp_path / "file").touch()
    assert "run_dir: cannot write in" in check_node(RunDir(tmp_path / "file")).problems[0]


def test_a_wrong_clock_is_a_problem(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = node_probe.time.time
    monkeypatch.setattr(node_probe.time, "time", lambda: now() + 100)
    report = check_node(run)
    assert "clock: the run directory's is -100" in report.problems[0]


def test_a_node_with_repeated_problems_is_excluded(run: RunDir) -> None:
    assert excluded_nodes(run) == []
    record = BadNodes(run)
    record.add("n1", "preflight", ["GPUs: found 3, needed: 4"])
    record.add("n2", "death", [])
    record.add("n1", "death", [])
    with record.path.open("ab") as file:
        file.write(b'{"half": \n[]\n\xff\n')
    assert [entry["node"] for entry in record.records()] == ["n1", "n2", "n1"]
    assert excluded_nodes(run) == ["n1"]
    assert excluded_nodes(run, threshold=1) == ["n1", "n2"]
    # After FORGET_S problems do not count any more.
    assert excluded_nodes(run, now=record.records()[-1]["time"] + node_probe.FORGET_S + 1) == []
