"""Containers of each runtime: golden commands of a role, settings that are refused, images without
Python, and podman itself."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.cluster.slurm import node_check
from relax_hpc.cluster.slurm.allocation import Allocation, GroupNodes
from relax_hpc.cluster.slurm.commands import Slurm
from relax_hpc.cluster.slurm.container import (
    EDF_FILE,
    STARTED_BY_PROGRAM,
    check_container,
    container_command,
    lacks_python,
)
from relax_hpc.cluster.slurm.steps import StepLauncher
from relax_hpc.commands.submit import submit
from relax_hpc.config import Config, load
from relax_hpc.config.load import dump
from relax_hpc.ops.doctor import host
from tests.guardian import session_folder
from tests.helpers.cluster_sizes import ROOT
from tests.helpers.containers import PYTHON, install, make_image
from tests.helpers.doctor_helpers import fake_fixture, make, site  # noqa: F401
from tests.helpers.fake_slurm import FakeSlurm
from tests.helpers.podman import PYTHON as PODMAN_PYTHON
from tests.helpers.podman import Podman
from tests.requirements import requires

requires("mpi")
GOLDEN = ROOT / "tests" / "golden" / "containers"
UPDATE = os.environ.get("RELAX_UPDATE_GOLDEN") == "1"
IMAGES = {
    "apptainer": "/images/relax_hpc.sif",
    "podman-hpc": "localhost/relax_hpc:1",
    "pyxis": "/images/relax_hpc.sqsh",
    "edf": "relax_hpc",
}
PATH = os.environ["PATH"]
IN_CONTAINER = "/opt/relax_hpc/.venv/bin/python"
"""Interpreter of the images; the one outside is another file."""


def with_container(runtime: str, **changes: Any) -> Config:
    container = {"runtime": runtime, "image": IMAGES[runtime], "python": IN_CONTAINER}
    values = {
        "name": "demo",
        "layout": "jobs",
        "model.device": "cuda",
        "model.path": "/models/m",
        "actor.parallel.data": 8,
        "groups": {"actor": {"resources": {"nodes": 2, "gpus_per_node": 4}}},
        "site.python": "/opt/outside/bin/python",
        "site.local_dir": "/nvme",
        "site.container": container | {"mounts": ["/datasets:/data"]} | changes,
    }
    return load([], values)


@pytest.mark.parametrize("runtime", IMAGES)
def test_the_command_of_a_role_equals_the_golden_file(runtime: str, tmp_path: Path) -> None:
    run, config = RunDir(tmp_path), with_container(runtime)
    dump(config, run.config)
    allocation = Allocation("4711", 0, "node1", {"actor": GroupNodes("4711", 2)})
    launcher = StepLauncher(run, config, Slurm(), allocation, lambda: None)
    text = "\n".join(launcher.commands("actor", 1)["actor"].arguments) + "\n"
    if (run.root / EDF_FILE).exists():
        text += f"==> {EDF_FILE} <==\n{(run.root / EDF_FILE).read_text()}"
    text = text.replace(str(tmp_path), "/scratch/demo")
    path = GOLDEN / f"{runtime}.txt"
    if UPDATE:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text, "if intended: RELAX_UPDATE_GOLDEN=1"
    assert IN_CONTAINER in text.splitlines() and "/opt/outside" not in text


def test_each_golden_file_has_a_runtime() -> None:
    assert {path.stem for path in GOLDEN.iterdir()} == set(IMAGES)


@pytest.mark.parametrize("runtime", IMAGES)
def test_pmix_and_options_of_the_container_are_refused_where_they_do_not_work(runtime: str) -> None:
    config = with_container(runtime, options=["--nccl"])
    config.site.mpi.launcher = "pmix"
    run_dir = Path("/scratch/demo")
    if runtime in STARTED_BY_PROGRAM:
        with pytest.raises(ConfigError) as caught:
            check_container(config, run_dir)
        assert str(caught.value).startswith(
            f"site.mpi.launcher: found pmix with container runtime {runtime}, in which slurmd's "
            "PMIx is not visible; allowed: pmi2"
        )
        config.site.mpi.launcher = "pmi2"
        *_, option, image = container_command(config, run_dir)
        assert (option, image) == ("--nccl", IMAGES[runtime])
    else:
        with pytest.raises(ConfigError) as caught:
            check_container(config, run_dir)
        assert str(caught.value) == (
            f"site.container.options: found ['--nccl'] with runtime {runtime}, allowed with "
            "apptainer and podman-hpc; set site.srun_options"
        )


NO_PYTHON = [
    f'FATAL:   "{IN_CONTAINER}": executable file not found in $PATH',
    f"FATAL:   stat {IN_CONTAINER}: no such file or directory",
    f"Error: crun: executable file `{IN_CONTAINER}` not found in $PATH: No such file or directory",
    f'Error: runc: exec failed: exec: "{IN_CONTAINER}": stat {IN_CONTAINER}: no such file or '
    "directory: OCI runtime attempted to invoke a command that was not found",
    f"slurmstepd: error: execve(): {IN_CONTAINER}: No such file or directory",
]


@pytest.mark.parametrize("output", NO_PYTHON)
def test_runtimes_say_that_an_image_has_no_python(output: str) -> None:
    config = with_container("apptainer")
    assert lacks_python(config, f"WARNING: a word before\n{output}\n")
    assert not lacks_python(config, output.replace(IN_CONTAINER, "/images/x.sif"))
    assert not lacks_python(config, f"{IN_CONTAINER} -m relax_hpc\nsrun: not found")


# -- images without Python -------------------------------------------------------------------------


def apptainer_site(folder: Path, python: bool) -> dict[str, Any]:
    """Settings of a site with an image, and with a program that makes real containers."""
    requires("bubblewrap")
    container = {
        "runtime": "apptainer",
        "program": str(install(folder / "bin")),
        "image": str(make_image(folder / "image", python=python)),
        "python": PYTHON,
    }
    return site(container=container, mpi={"launcher": "pmi2", "library": "wheel"})


def test_an_image_without_python_is_not_submitted(
    fake: FakeSlurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{os.environ['PATH']}:{PATH}")
    config = make(tmp_path, {"layout": "jobs"} | apptainer_site(tmp_path, python=False))
    with pytest.raises(ConfigError) as caught:
        submit(config, resume=False, dry_run=False)
    message = str(caught.value)
    assert message.startswith(
        f"site.container.python: found {PYTHON}, which the image {tmp_path}/image does not have ("
    )
    assert "\n" not in message and caught.value.exit_code == EXIT_CONFIG
    assert not Path(config.run_dir).exists()
    submitted = [call for call in fake.calls("sbatch") if "--test-only" not in call["argv"]]
    assert submitted == []


def test_nodes_without_python_in_the_image_end_the_run(tmp_path: Path) -> None:
    """No other node would help, so that the group is not tried elsewhere."""
    config, launcher = with_container("pyxis"), SimpleNamespace(run=RunDir(tmp_path))
    step = subprocess.Popen(
        ["echo", NO_PYTHON[-1]], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    check = node_check.NodeCheck("actor", config, step, time.monotonic() + 30.0, False)
    failure = node_check._evaluate(cast(StepLauncher, launcher), check)
    assert failure.is_hopeless and "\n" not in failure.reason
    assert failure.reason.startswith(
        f"site.container.python: found {IN_CONTAINER}, which the image"
    )


# -- podman ----------------------------------------------------------------------------------------

REPORT = """
import json, os, resource, signal, sys
from pathlib import Path

def end(*_):
    Path(sys.argv[1], "ended").write_text(os.environ["RELAX_WORD"])
    sys.exit(5)

signal.signal(signal.SIGUSR2, end)
spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("net", "pid")}
shm = sorted(os.listdir("/dev/shm"))
report = {"python": sys.executable, "spaces": spaces, "shm": shm}
report["files"] = resource.getrlimit(resource.RLIMIT_NOFILE)
print(json.dumps(report), flush=True)
signal.pause()
"""


@pytest.fixture(scope="module")
def podman() -> Iterator[Podman]:
    """Podman in a folder with a short path: podman refuses one of more than 50 characters."""
    requires("podman")
    podman = Podman(Path(tempfile.mkdtemp(dir=session_folder())) / "podman")
    yield podman
    podman.close()


def podman_config(podman: Podman, run_dir: Path) -> Config:
    container = {"program": str(podman.program), "image": podman.image, "python": PODMAN_PYTHON}
    config = with_container("podman-hpc", **container, mounts=podman.mounts)
    config.model.device, config.model.path = "cpu", ""
    config.site.local_dir, config.run_dir = str(run_dir), str(run_dir)
    return config


def test_podman_gives_a_role_the_host_and_the_interpreter_of_the_image(
    podman: Podman, tmp_path: Path
) -> None:
    config, shared = podman_config(podman, tmp_path), Path("/dev/shm", f"relax-{os.getpid()}")
    command = [*container_command(config, tmp_path), PODMAN_PYTHON, "-c", REPORT, str(tmp_path)]
    shared.touch()
    try:
        role = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            env=os.environ | {"RELAX_WORD": "from the step"},
            text=True,
        )
        assert role.stdout is not None
        report = json.loads(role.stdout.readline())
    finally:
        shared.unlink()
    assert report["python"] == PODMAN_PYTHON and not Path(PODMAN_PYTHON).exists()
    own = {name: str(Path("/proc/self/ns", name).readlink()) for name in ("net", "pid")}
    assert {name: report["spaces"][name] for name in own} == own
    assert tuple(report["files"]) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert shared.name in report["shm"], "groups of a node share memory"
    # srun sends this signal to the task, which is podman.
    role.send_signal(signal.SIGUSR2)
    assert role.wait(timeout=60) == 5
    ended = tmp_path / "ended"
    assert ended.read_text() == "from the step" and ended.stat().st_uid == os.getuid()


def test_podman_says_that_an_image_has_no_python(podman: Podman, tmp_path: Path) -> None:
    config = podman_config(podman, tmp_path)
    config.site.container.image = podman.empty_image
    (finding,) = host._container_python(config)
    assert finding.severity == "error"
    assert finding.text.startswith(
        f"site.container.python: found {PODMAN_PYTHON}, which the image {podman.empty_image} does"
    )
    config.site.container.image = "localhost/missing:1"
    (finding,) = host._container_python(config)
    assert finding.severity == "warning" and "did not start on this host" in finding.text
    config.site.container.image = podman.image
    config.site.container.options = [f"--volume={mount}" for mount in podman.mounts]
    assert list(host._container_python(config)) == []
