"""Facts of machines, real and invented, and the requirements of the locks that they meet or not."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from relax_hpc.base.free_memory import available_host_bytes
from relax_hpc.base.machine.facts import (
    UNLIMITED,
    Disk,
    Facts,
    ask_driver,
    facts_from_json,
    facts_to_json,
    read_facts,
)
from relax_hpc.base.machine.gpu_vendors import (
    CompatDriver,
    Driver,
    compat_variables,
    find_compat_driver,
)
from relax_hpc.base.machine.gpu_vendors.cuda_compat import VARIABLE
from relax_hpc.base.machine.gpu_vendors.nvidia import gpu_capability
from relax_hpc.base.machine.requirements import (
    GPU,
    INSTALLATION,
    PROGRAMS,
    find_problems,
    load_needs,
    read_needs,
)

ROOT = Path(__file__).resolve().parents[2]
MACHINE = ROOT / "relax_hpc/base/machine"
LOCKS = {name: read_needs(ROOT / f"env/requirements-{name}.json") for name in ("cpu", "gpu")}
TERABYTE = 10**12
H100 = Driver("580.65.06", ("NVIDIA H100 80GB HBM3",) * 8, ("9.0",) * 8, vendor="nvidia")
COMPAT = CompatDriver("580.65.06", "/usr/local/cuda/compat")
GOOD = Facts(
    system="Linux",
    architecture="x86_64",
    libc="glibc 2.36",
    python="3.11.2",
    open_files=UNLIMITED,
    c_compiler="/usr/bin/gcc",
    disk=Disk("/home", 1, TERABYTE),
    temporary_disk=Disk("/tmp", 2, TERABYTE),
    driver=H100,
    gpus_on_bus=("nvidia",) * 8,
)
ALL = (INSTALLATION, GPU, PROGRAMS)


def problems(lock: str = "gpu", **changes: Any) -> list[str]:
    return [str(problem) for problem in find_problems(GOOD._replace(**changes), LOCKS[lock], ALL)]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"architecture": "aarch64", "driver": H100._replace(gpus=("NVIDIA GH200 480GB",))},
        # A login node.
        {"driver": Driver(), "gpus_on_bus": ()},
        {"driver": H100._replace(capabilities=("8.0", "8.9", "12.1"))},
        # A model that is not in the table, on which nvidia-smi was too slow.
        {"driver": H100._replace(gpus=("NVIDIA X999",), capabilities=())},
        {"driver": H100._replace(version="535.1"), "compat_driver": COMPAT},
        {
            "driver": H100._replace(version="570.86.15", gpus=("NVIDIA RTX A6000",)),
            "compat_driver": COMPAT._replace(is_chosen=True),
        },
        {"python": "3.12.9", "libc": "glibc 2.34", "open_files": 4096},
        # What cannot be read is not compared.
        Facts()._asdict() | {"c_compiler": "gcc"},
    ],
)
def test_machines_that_meet_the_requirements(changes: dict[str, Any]) -> None:
    assert problems(**changes) == []


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"libc": "glibc 2.28"},
            "glibc 2.28 found, 2.34 needed by sglang 0.5.21: use site.container (env/relax_hpc.def)",
        ),
        ({"libc": "musl"}, "musl found, glibc 2.34 needed by sglang 0.5.21: "),
        (
            {"architecture": "ppc64le"},
            "CPU architecture ppc64le found, x86_64 or aarch64 needed by the wheels of this lock: ",
        ),
        ({"system": "Darwin", "architecture": "arm64", "libc": ""}, "Darwin found, Linux needed "),
        ({"python": "3.6.8"}, "Python 3.6.8 found, 3.11 or 3.12 needed by the wheels of this lock"),
        ({"python": "3.13.1"}, "Python 3.13.1 found, 3.11 or 3.12 needed by "),
        ({"open_files": 1024}, "nofile limit (ulimit -Hn) 1024 found, 4096 needed for connections"),
        ({"c_compiler": ""}, "no C compiler found, gcc or cc on PATH, or CC needed by Triton: "),
        (
            {"user_namespaces": "user.max_user_namespaces is 0"},
            "user namespaces forbidden (user.max_user_namespaces is 0) found, permission needed for",
        ),
        (
            {"driver": H100._replace(version="570.86.15")},
            "NVIDIA driver 570.86.15 found, 580 or newer needed by CUDA 13.0: update it; or install "
            "cuda-compat-13-0, and name its folder in site.env.RELAX_COMPAT_LIBRARIES",
        ),
        (
            {
                "driver": H100._replace(version="535.1"),
                "compat_driver": COMPAT._replace(version="550.54.15"),
            },
            "NVIDIA driver 535.1 found, 580 or newer needed by CUDA 13.0: update it; or install ",
        ),
        (
            {"driver": H100._replace(version="560.28.03"), "compat_driver": COMPAT},
            "NVIDIA driver 560.28.03 found, 580 or newer needed by CUDA 13.0: update it; "
            "cuda-compat for CUDA 13 works with drivers 535, 550, 565, 570, 575 only",
        ),
        (
            {
                "driver": H100._replace(version="570.86.15", gpus=("NVIDIA GeForce RTX 4090",)),
                "compat_driver": COMPAT._replace(is_chosen=True, is_loaded=True),
            },
            "NVIDIA driver 570.86.15 found, 580 or newer needed by CUDA 13.0: update it; "
            "cuda-compat does not work on NVIDIA GeForce RTX 4090, only on data-centre GPUs",
        ),
        (
            {
                "driver": H100._replace(version="570.86.15", gpus=("NVIDIA RTX A6000",)),
                "compat_driver": COMPAT,
            },
            "NVIDIA driver 570.86.15 found, 580 or newer needed by CUDA 13.0: update it; "
            "NVIDIA RTX A6000 is not known as a data-centre GPU, on which cuda-compat works",
        ),
        ({"driver": Driver(answers=False)}, "NVIDIA driver without an answer found, an answer "),
        ({"disk": Disk("/home", 1, 10**9)}, "1.0 GB free in /home found, 10.0 GB needed for the "),
        ({"temporary_disk": Disk("/tmp", 2, 0)}, "0.0 GB free in /tmp found, 4.2 GB needed for "),
        (
            {"disk": Disk("/a", 1, 11 * 10**9), "temporary_disk": Disk("/b", 1, 11 * 10**9)},
            "11.0 GB free in /a found, 14.2 GB needed for the installation: free some, or set "
            "RELAX_VENV to a folder on another disk",
        ),
    ],
)
def test_a_missing_requirement_is_one_line(changes: dict[str, Any], text: str) -> None:
    (line,) = problems(**changes)
    assert line.startswith(text) and "\n" not in line
    found_problems = find_problems(GOOD._replace(**changes), LOCKS["gpu"], ALL)
    assert all(problem.is_fatal for problem in found_problems)


def test_too_little_space_is_only_a_warning_without_cuda() -> None:
    """Other indexes have builds of torch for CPUs, which are far smaller."""
    facts = GOOD._replace(disk=Disk("/home", 1, 10**9))
    (problem,) = find_problems(facts, LOCKS["cpu"], [INSTALLATION])
    assert str(problem).startswith("1.0 GB free in /home found") and not problem.is_fatal


def test_gpus_for_which_a_package_has_no_code() -> None:
    volta = Driver("580.65.06", ("Tesla V100-SXM2-32GB",) * 4, ("7.0",) * 4)
    lines = problems(driver=volta)
    assert [line.partition(" needed by ")[2].partition(":")[0] for line in lines] == [
        "sglang-kernel 0.4.7",
        "torch 2.13.0",
    ]
    assert lines[0].startswith("GPU of compute capability 7.0 (Tesla V100-SXM2-32GB) found, one of")
    # The wheel of torch has code for Turing, that of sglang-kernel has none.
    (line,) = problems(driver=volta._replace(gpus=("Tesla T4",), capabilities=("7.5",)))
    assert "needed by sglang-kernel" in line
    assert problems("cpu", driver=volta) == []
    # On aarch64 there is code for fewer kinds.
    a100 = H100._replace(gpus=("NVIDIA A100",), capabilities=("8.0",))
    assert len(problems(driver=a100, architecture="aarch64")) == 1


def test_a_missing_driver_is_not_fatal() -> None:
    facts = GOOD._replace(driver=Driver())
    (problem,) = find_problems(facts, LOCKS["gpu"], [GPU])
    assert str(problem).startswith("8 NVIDIA GPUs without a driver found, 580 or newer needed")
    assert not problem.is_fatal


def test_a_lock_without_wheels_for_an_architecture() -> None:
    wheels = LOCKS["cpu"]["architectures"]["x86_64"]
    needs = LOCKS["cpu"] | {
        "architectures": {"x86_64": wheels, "aarch64": {"missing": ["decord 0.6.0"]}}
    }
    facts = GOOD._replace(architecture="aarch64", libc="glibc 2.28", disk=Disk("/", 1, 0))
    (problem,) = find_problems(facts, needs, ALL)
    assert str(problem).startswith(
        "CPU architecture aarch64 found, x86_64 needed by decord 0.6.0: install on "
    )


def test_an_environment_without_needs_file_has_only_constant_needs(tmp_path: Path) -> None:
    assert load_needs(str(tmp_path)) == {}
    (tmp_path / "minimum_requirements.json").write_text("[]")
    assert load_needs(str(tmp_path)) == {}
    assert find_problems(GOOD._replace(libc="glibc 2.28", python="3.13"), {}, ALL) == []
    problems_found = find_problems(
        GOOD._replace(open_files=64, driver=Driver("550.1")), {"cuda": "13.0"}, ALL
    )
    assert [problem.found for problem in problems_found] == [
        "nofile limit (ulimit -Hn) 64",
        "NVIDIA driver 550.1",
    ]
    older_cuda = find_problems(GOOD._replace(driver=Driver("550.1")), {"cuda": "12.8"}, ALL)
    assert (
        older_cuda
        == find_problems(GOOD._replace(driver=Driver("1.1")), {"cuda": "99.0"}, ALL)
        == []
    )


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


VERSION = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (dvs@b)  "
    "Sun Jul 27 06:33:01 UTC 2025\nGCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


def gpu_machine(root: Path, *models: str) -> Path:
    """Files of a machine with an NVIDIA driver, as its releases 535 to 580 write them."""
    write(root, "proc/driver/nvidia/version", VERSION)
    for number, model in enumerate(models):
        address = f"0000:{number:02x}:00.0"
        write(
            root,
            f"proc/driver/nvidia/gpus/{address}/information",
            f"Model: \t\t {model}\nIRQ:   \t\t 110\nGPU UUID: \t GPU-{number}\n",
        )
        write(root, f"sys/bus/pci/devices/{address}/vendor", "0x10de\n")
        write(root, f"sys/bus/pci/devices/{address}/class", "0x030200\n")
    return root


def test_the_driver_is_read_from_its_files(tmp_path: Path) -> None:
    gpu_machine(tmp_path, "NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB")
    # A bridge of NVLink is no GPU.
    write(tmp_path, "sys/bus/pci/devices/0000:99:00.0/vendor", "0x10de\n")
    write(tmp_path, "sys/bus/pci/devices/0000:99:00.0/class", "0x068000\n")
    facts = read_facts(root=str(tmp_path), environment={"PATH": ""}, driver_deadline_s=30)
    assert facts.driver == Driver(
        "580.65.06",
        ("NVIDIA H100 80GB HBM3", "Tesla V100-SXM2-32GB"),
        ("9.0", "7.0"),
        vendor="nvidia",
    )
    assert facts.gpus_on_bus == ("nvidia",) * 2 and facts.c_compiler == ""


def test_an_unknown_model_is_looked_up_by_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_machine(tmp_path, "NVIDIA X999")
    write(tmp_path, "bin/nvidia-smi", "#!/bin/sh\necho 11.0\n")
    (tmp_path / "bin/nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    assert ask_driver(str(tmp_path), 30).capabilities == ("11.0",)
    (tmp_path / "bin/nvidia-smi").unlink()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert ask_driver(str(tmp_path), 30) == Driver("580.65.06", ("NVIDIA X999",), vendor="nvidia")


def test_a_hanging_driver_times_out(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    # The open of a FIFO without a writer blocks, like files of a driver in trouble.
    os.mkfifo(tmp_path / "proc/driver/nvidia/version")
    started = time.monotonic()
    assert ask_driver(str(tmp_path), 0.2) == Driver(answers=False, vendor="nvidia")
    assert time.monotonic() - started < 30


def test_a_machine_without_driver_files(tmp_path: Path) -> None:
    facts = read_facts(root=str(tmp_path / "nothing"), environment={"PATH": "", "CC": "icx -O2"})
    assert facts.driver == Driver() and facts.gpus_on_bus == () and facts.c_compiler == ""
    assert facts.disk == Disk()


@pytest.mark.parametrize(
    ("path", "text", "reason"),
    [
        ("sys/user/max_user_namespaces", "0", "user.max_user_namespaces is 0"),
        ("sys/user/max_user_namespaces", "96365", ""),
        ("sys/kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone is 0"),
        (
            "sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "kernel.apparmor_restrict_unprivileged_userns is 1",
        ),
    ],
)
def test_reasons_for_missing_user_namespaces(
    tmp_path: Path, path: str, text: str, reason: str
) -> None:
    write(tmp_path, f"proc/{path}", text)
    write(tmp_path, "proc/self/ns/user", "")
    assert read_facts(root=str(tmp_path), user=1000).user_namespaces == reason
    assert read_facts(root=str(tmp_path), user=0).user_namespaces == ""


def test_this_machine(tmp_path: Path) -> None:
    facts = read_facts(str(tmp_path / "not/there"), environment={**os.environ, "TMPDIR": "/"})
    assert facts.system == "Linux" and facts.architecture == os.uname().machine
    assert facts.libc.startswith("glibc 2.") and facts.python.startswith("3.")
    assert facts.disk.path == str(tmp_path) and facts.disk.free_bytes > 0
    assert facts.temporary_disk.path == "/"
    # Facts of a node replace those of the machine on which the installation is made.
    other = GOOD._replace(libc="glibc 2.28")
    kept = {"python": facts.python, "disk": facts.disk, "temporary_disk": facts.temporary_disk}
    assert facts_from_json(facts_to_json(other), facts) == other._replace(**kept)


def make_compat(folder: Path, version: str) -> str:
    """A folder as in package cuda-compat."""
    folder.mkdir(parents=True)
    (folder / f"libcuda.so.{version}").touch()
    (folder / "libcuda.so.1").symlink_to(f"libcuda.so.{version}")
    return str(folder)


def test_cuda_compat_is_taken_from_a_chosen_or_a_known_folder(tmp_path: Path) -> None:
    loaded = make_compat(tmp_path / "loaded", "580.65.06")
    chosen = make_compat(tmp_path / "chosen", "580.82.07")
    make_compat(tmp_path / "root/usr/local/cuda-12.9/compat", "575.57.08")
    known = make_compat(tmp_path / "root/usr/local/cuda-13.0/compat", "580.95.05")
    root = str(tmp_path / "root")
    variables = {"LD_LIBRARY_PATH": f"/nothing:{loaded}", VARIABLE: chosen}
    compat = find_compat_driver(variables, root)
    assert compat == CompatDriver("580.65.06", loaded, is_chosen=True, is_loaded=True)
    assert compat_variables(compat, variables) == {}
    variables["LD_LIBRARY_PATH"] = ":/nothing"
    compat = find_compat_driver(variables, root)
    assert compat == CompatDriver("580.82.07", chosen, is_chosen=True)
    assert compat_variables(compat, variables) == {"LD_LIBRARY_PATH": f"{chosen}::/nothing"}
    assert find_compat_driver({VARIABLE: "/nothing"}, root).version == ""
    compat = find_compat_driver({}, root)
    assert compat == CompatDriver("580.95.05", known)
    assert compat_variables(compat, {}) == {"LD_LIBRARY_PATH": known}
    assert find_compat_driver({}, str(tmp_path)) == CompatDriver()


RESTARTED_ROLE = """
import os, sys
from relax_hpc.base.machine import own_environment
from relax_hpc.base.machine.facts import Driver, read_facts
driver = Driver(sys.argv[1], (sys.argv[2],), ("9.0",))
own_environment.read_facts = lambda: read_facts(with_driver=False)._replace(driver=driver)
own_environment.own_needs = lambda: {"cuda": "13.0"}
own_environment.restart_with_compat_driver("role", sys.argv[1:])
print(os.getpid(), os.environ.get("LD_LIBRARY_PATH", ""))
"""


@pytest.mark.parametrize(
    ("driver", "gpu", "is_used"),
    [
        ("535.230.02", "NVIDIA H100 80GB HBM3", True),
        ("580.65.06", "NVIDIA H100 80GB HBM3", False),
        ("535.230.02", "NVIDIA GeForce RTX 4090", False),
        ("", "NVIDIA H100 80GB HBM3", False),
    ],
)
def test_a_role_restarts_with_cuda_compat_where_its_driver_is_too_old(
    tmp_path: Path, driver: str, gpu: str, is_used: bool
) -> None:
    folder = make_compat(tmp_path / "compat", "580.82.07")
    (tmp_path / "role.py").write_text(RESTARTED_ROLE)
    process = subprocess.Popen(
        [sys.executable, "-m", "role", driver, gpu],
        cwd=tmp_path,
        env={VARIABLE: folder, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    output, _ = process.communicate(timeout=60)
    assert output.rstrip("\n") == f"{process.pid} {folder if is_used else ''}"


@pytest.mark.parametrize(
    ("name", "capability"),
    [
        ("NVIDIA H100 80GB HBM3", "9.0"),
        ("NVIDIA GH200 480GB", "9.0"),
        ("NVIDIA A100-SXM4-40GB", "8.0"),
        ("NVIDIA L40S", "8.9"),
        ("NVIDIA GB200", "10.0"),
        ("Tesla P100-PCIE-16GB", "6.0"),
        ("NVIDIA RTX A1000", ""),
        ("NVIDIA GeForce RTX 4090", ""),
    ],
)
def test_compute_capabilities_by_name(name: str, capability: str) -> None:
    assert gpu_capability(name) == capability


def run_program(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command of `env/setup.sh`."""
    return subprocess.run(
        [sys.executable, "-S", "-E", "-B", "-m", "machine", *arguments],
        cwd=MACHINE.parent,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_the_program_needs_no_installation(tmp_path: Path) -> None:
    needs = ("--needs", str(ROOT / "env/requirements-gpu.json"), "--use=gpu")
    facts = tmp_path / "facts.json"
    facts.write_text(facts_to_json(GOOD))
    done = run_program(*needs, "--facts", str(facts))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    facts.write_text(
        json.dumps({"libc": "glibc 2.28", "architecture": "x86_64", "python": "3.6.8"})
    )
    done = run_program(*needs, "--facts", str(facts))
    assert done.returncode == 78 and done.stdout.startswith("glibc 2.28 found, 2.34 needed by ")
    assert "Python 3.6.8 found" in done.stdout
    assert "Python" not in run_program(*needs, "--facts", str(facts), "--ignore-python").stdout
    assert json.loads(run_program("--print-facts").stdout)["system"] == "Linux"


@pytest.mark.parametrize(
    "text", ["", "[]", '{"libc": 1}', '{"nothing": 2}', '{"driver": {"x": 1}}', '{"driver": 1}']
)
def test_bad_facts_are_one_line(tmp_path: Path, text: str) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(text)
    done = run_program("--facts", str(facts))
    assert done.returncode == 78 and done.stdout.count("\n") == 1 and not done.stderr


@pytest.mark.parametrize("path", sorted(MACHINE.rglob("*.py")), ids=lambda path: path.stem)
def test_python_3_6_can_read_it(path: Path) -> None:
    tree = ast.parse(path.read_bytes(), feature_version=(3, 6))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module != "__future__", "Python 3.6 does not know annotations"
            assert (node.module or "").split(".")[0] in sys.stdlib_module_names


def numa_node(folder: Path, number: int, cpus: str, free_kib: int, cached_kib: int) -> None:
    """A NUMA node as the kernel shows it in /sys/devices/system/node."""
    node = folder / f"node{number}"
    node.mkdir(parents=True)
    (node / "cpulist").write_text(f"{cpus}\n")
    (node / "meminfo").write_text(
        f"Node {number} MemTotal:       {2 * (free_kib + cached_kib)} kB\n"
        f"Node {number} MemFree:        {free_kib} kB\n"
        f"Node {number} Active(anon):   500 kB\n"
        f"Node {number} Active(file):   {cached_kib - 60} kB\n"
        f"Node {number} Inactive(file): 40 kB\n"
        f"Node {number} SReclaimable:   20 kB\n"
    )


def test_memory_of_gpus_is_not_host_memory(tmp_path: Path) -> None:
    """Grace Hopper shows the memory of a GPU as a NUMA node without CPUs."""
    for number, cpus in enumerate(("0-71", "72-143")):
        numa_node(tmp_path, number, cpus, free_kib=3000, cached_kib=1000)
    for number in (4, 12):
        numa_node(tmp_path, number, "", free_kib=5000, cached_kib=2000)
    (tmp_path / "node5").mkdir()
    (tmp_path / "online").write_text("0-1,4,12\n")
    assert available_host_bytes(tmp_path, available=21000 * 1024) == (21000 - 14000) * 1024
    assert available_host_bytes(tmp_path, available=13000 * 1024) == 0


def test_all_memory_is_host_memory_without_such_nodes(tmp_path: Path) -> None:
    numa_node(tmp_path, 0, "0-7", free_kib=3000, cached_kib=1000)
    assert available_host_bytes(tmp_path, available=4000) == 4000
    assert available_host_bytes(tmp_path / "missing", available=4000) == 4000
    # Other processes change the figure between the two reads.
    assert available_host_bytes() == pytest.approx(psutil.virtual_memory().available, rel=0.5)
