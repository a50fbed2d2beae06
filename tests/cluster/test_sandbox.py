"""The sandbox: a real Slurm that starts, loses nodes, restarts, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, ConfigError, RelaxError
from relax_hpc.cluster.sandbox import Options, Sandbox, cluster, config_files, machine, processes
from relax_hpc.cluster.sandbox.installation import SlurmInstallation
from relax_hpc.cluster.sandbox.processes import until
from relax_hpc.commands.program import main
from relax_hpc.config.load import build, compose
from relax_hpc.config.schema import Config
from tests.guardian import session_folder
from tests.helpers.slurm_sandbox import left_behind, private_sandbox, requires_sandbox
from tests.plain_user import plain_user
from tests.requirements import requires

pytestmark = pytest.mark.slurm

WAIT_S = 120.0
WAITING_JOB = """\
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
deadline = time.monotonic() + 60
(folder / "pid").write_text(f"{os.getpid()}\\n")
while not (folder / "end").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
(folder / "done").touch()
"""
RANKS = """\
import os
import numpy as np
from mpi4py import MPI
ranks = np.zeros(MPI.COMM_WORLD.Get_size(), "i4")
MPI.COMM_WORLD.Allgather(np.array([MPI.COMM_WORLD.Get_rank()], "i4"), ranks)
print(os.environ["SLURMD_NODENAME"], ranks.sum())
"""


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short path: paths of pytest are too long for the sockets of a sandbox."""
    with tempfile.TemporaryDirectory(dir=session_folder()) as name:
        yield Path(name)


def submit_script(sandbox: Sandbox, folder: Path, script: str, *options: str) -> int:
    """Submit `script` and return the job's id."""
    path = folder / "job.sh"
    path.write_text(f"#!/bin/bash\n{script}\n")
    command = (
        "sbatch",
        "--parsable",
        f"--output={folder}/%j.out",
        f"--chdir={folder}",
        *options,
        str(path),
    )
    return int(sandbox.client(*command))


def start_job(sandbox: Sandbox, folder: Path, *options: str) -> tuple[int, psutil.Process]:
    """Start a job that runs until `folder`/end exists. Return its id and its process."""
    (folder / "beats.py").write_text(WAITING_JOB)
    job = submit_script(
        sandbox, folder, f"exec {sys.executable} {folder}/beats.py {folder}", *options
    )
    pid = folder / "pid"
    until(
        lambda: pid.exists() and pid.read_text().endswith("\n"), WAIT_S, f"job {job} does not start"
    )
    return job, psutil.Process(int(pid.read_text()))


def state_of(sandbox: Sandbox, job: int) -> str:
    return sandbox.client(
        "squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job}"
    ).split()[0]


def test_up_status_and_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with private_sandbox() as sandbox:
        folder = str(sandbox.folder)
        assert sandbox.is_up() and main(["sandbox", "status", str(folder)]) == EXIT_DONE
        pids = sandbox.daemons()
        assert main(["sandbox", "up", str(folder)]) == EXIT_DONE and sandbox.daemons() == pids, (
            "running daemons are not restarted"
        )
        assert main(["sandbox", "up", str(folder), "--nodes", "3"]) == EXIT_CONFIG
        assert "down first" in capsys.readouterr().err
        start_job(sandbox, tmp_path)
        assert main(["sandbox", "down", str(folder)]) == EXIT_DONE
        assert left_behind(sandbox.folder) == [] and set(sandbox.daemons().values()) == {0}
        listening = {
            connection.laddr.port
            for connection in psutil.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }
        assert not listening & set(range(sandbox.options.port, sandbox.options.port + 64))
        assert main(["sandbox", "down", str(folder)]) == EXIT_DONE, "a second down is not an error"
        assert main(["sandbox", "status", str(folder)]) == EXIT_RETRY
        assert "slurmctld        DOWN" in capsys.readouterr().out
        assert cluster.load(folder).options == sandbox.options, "the next up has the same options"


def await_idle(sandbox: Sandbox) -> None:
    """Wait until no node has a job. A job of an earlier test may still be completing."""
    until(
        lambda: set(sandbox.node_states().values()) == {"idle"}, WAIT_S, f"{sandbox.node_states()}"
    )


def test_srun_over_nodes(sandbox: Sandbox) -> None:
    await_idle(sandbox)
    command = (
        "srun",
        f"--nodes={len(sandbox.nodes)}",
        "--ntasks-per-node=2",
        "--gpus-per-node=2",
        "printenv",
    )
    node_counts = Counter(sandbox.client(*command, "SLURMD_NODENAME").split())
    assert node_counts == dict.fromkeys(sandbox.nodes, 2)
    assert sandbox.client(*command, "CUDA_VISIBLE_DEVICES").split() == ["0,1"] * 2 * len(
        sandbox.nodes
    )


def test_heterogeneous_job_starts_within_seconds(sandbox: Sandbox, tmp_path: Path) -> None:
    script = (
        "#SBATCH --nodes=2 --ntasks-per-node=1\n#SBATCH hetjob\n#SBATCH --nodes=1 "
        "--ntasks-per-node=2\n"
        "srun --het-group=0,1 printenv SLURM_PROCID > ranks && mv ranks done"
    )
    job = submit_script(sandbox, tmp_path, script)
    until((tmp_path / "done").exists, 10.0, f"job {job}: {sandbox.client('squeue')}")
    assert sorted((tmp_path / "done").read_text().split()) == ["0", "1", "2", "3"]
    until(lambda: state_of(sandbox, job) == "COMPLETED", WAIT_S, f"job {job} does not end")


def test_the_site_file_starts_mpi_ranks(sandbox: Sandbox) -> None:
    site = build(Config, compose([str(sandbox.site)], {}).tree).site
    assert (site.name, site.partition, site.interface) == ("sandbox", "main", "lo")
    requires("mpi")
    library = {} if site.mpi.library == "wheel" else {"MPI4PY_LIBMPI": site.mpi.library}
    step = [
        "srun",
        f"--mpi={site.mpi.launcher}",
        "--nodes=2",
        "--ntasks-per-node=2",
        sys.executable,
        "-c",
        RANKS,
    ]
    await_idle(sandbox)
    srun = subprocess.run(
        step,
        env=sandbox.environment() | site.env | library,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert sorted(srun.stdout.splitlines()) == ["node1 6", "node1 6", "node2 6", "node2 6"], (
        srun.stderr
    )


def test_a_killed_node_ends_its_processes_and_can_restart(
    small_sandbox: Sandbox, tmp_path: Path
) -> None:
    sandbox = small_sandbox
    script = f"env -i setsid {sys.executable} {tmp_path}/beats.py {tmp_path} & wait"
    (tmp_path / "beats.py").write_text(WAITING_JOB)
    submit_script(sandbox, tmp_path, script, "--nodelist=node2", "--no-requeue")
    until((tmp_path / "pid").exists, WAIT_S, "the job does not start")
    process = psutil.Process(int((tmp_path / "pid").read_text()))
    killed = sandbox.kill_node("node2", down=True)
    assert process.pid in killed and sandbox.daemons()["slurmd-node2"] == 0
    assert not processes.alive(process) and not processes.steps(sandbox.folder, "node2")
    assert (
        sandbox.node_states()["node2"].startswith("down")
        and sandbox.node_states()["node1"] == "idle"
    )
    assert sandbox.kill_node("node2") == [], "a dead node stays dead"
    sandbox.start_node("node2")
    assert (
        sandbox.client("srun", "--nodelist=node2", "printenv", "SLURMD_NODENAME").strip() == "node2"
    )


def test_a_running_job_survives_a_restart_of_slurm(small_sandbox: Sandbox, tmp_path: Path) -> None:
    sandbox = small_sandbox
    job, process = start_job(sandbox, tmp_path, "--job-name=survivor")
    # slurmctld saves its state every 5 s. After kill -9 it has lost everything else.
    state_file = sandbox.folder / "state/job_state"
    started = process.create_time()

    def has_saved_the_job() -> bool:
        # A state from before the job can be written after the job started.
        return (
            state_file.exists()
            and state_file.stat().st_mtime > started
            and b"survivor" in state_file.read_bytes()
        )

    until(has_saved_the_job, WAIT_S, "slurmctld does not save its state")
    pids_before = sandbox.daemons()
    sandbox.restart()
    pids_after = sandbox.daemons()
    assert (
        all(pids_before[name] != pids_after[name] for name in pids_before if name != "munged")
        and sandbox.is_up()
    )
    assert state_of(sandbox, job) == "RUNNING" and processes.alive(process)
    sandbox.stop_controller()
    assert sandbox.node_states() == {} and processes.alive(process)
    sandbox.start_controller()
    (tmp_path / "end").touch()
    until(lambda: state_of(sandbox, job) == "COMPLETED", WAIT_S, f"job {job} does not end")
    assert (tmp_path / "done").exists()


def test_two_sandboxes_run_at_the_same_time(sandbox: Sandbox, tmp_path: Path) -> None:
    lines = (
        "PreemptType=preempt/partition_prio",
        "PreemptMode=REQUEUE",
        "PartitionName=urgent Nodes=ALL PriorityTier=9",
    )
    with private_sandbox(nodes=1, gpus=0, extra=lines) as second:
        assert second.client("sinfo", "--noheader", "--format=%R").split() == ["main", "urgent"]
        job, _ = start_job(second, tmp_path, "--cpus-per-task=8")
        assert state_of(second, job) == "RUNNING" and sandbox.client("squeue", "--noheader") == ""
        assert (
            second.client("srun", "--partition=urgent", "--cpus-per-task=8", "echo", "first")
            == "first\n"
        )
        assert state_of(second, job) == "PENDING", "preempted"
    assert sandbox.is_up()


@pytest.mark.root
def test_a_plain_user_can_run_a_sandbox() -> None:
    requires_sandbox()
    with plain_user() as user:
        folder, sandbox = user.home / "slurm", (user.python, "-m", "relax_hpc", "sandbox")
        up = user.run(*sandbox, "up", folder, "--nodes", "2")
        assert up.returncode == EXIT_DONE, up.stderr
        private = cluster.load(folder)
        try:
            assert {
                folder.owner(),
                *(psutil.Process(pid).username() for pid in private.daemons().values()),
            } == {user.name}
            step = user.run("bash", "-c", f". {folder}/env.sh && srun --nodes=2 id -un")
            assert step.stdout.split() == [user.name] * 2, step.stderr
            if os.getuid() != user.entry.pw_uid:
                with pytest.raises(ConfigError, match="another user's"):
                    cluster.up(folder)
            down = user.run(*sandbox, "down", folder)
            assert down.returncode == EXIT_DONE and left_behind(folder) == [], down.stderr
        finally:
            cluster.down(folder)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["up", "DIR/" + "x" * 80], "allowed 64: the kernel allows no Unix socket"),
        (["up", "DIR/a b"], "/a b', allowed letters"),
        (
            ["up", "DIR/x", "--nodes", "0"],
            "nodes: found 0, allowed 1 to 60, or 0 with declared nodes",
        ),
        (
            ["up", "DIR/x", "--declared", "big[1-2]; x"],
            "found 'big[1-2]; x', allowed: names and sizes",
        ),
        (
            ["up", "DIR/x", "--bind", "--cpus", "1024"],
            "cpus: found 1024 with bind, allowed: up to the ",
        ),
        (["up", "DIR/x/y", "--port", "1"], "port: 1 of 127.0.0.1 is in use"),
        (
            ["up", "DIR/x", "--slurm", "DIR/none"],
            "found no slurmctld, slurmd, slurmstepd, scontrol",
        ),
        (["up", "DIR/x", "--slurm", "DIR/a b"], "/a b', allowed: an absolute path"),
        (["up", "DIR/x", "--extra", "no setting"], "allowed one line of slurm.conf"),
        (["up", "DIR/x", "DIR/y"], "allowed one DIR"),
        (["explode"], "explode: unknown verb, allowed: up, down"),
        (["status", "DIR/no/sandbox/here"], "/no/sandbox/here, start one with up"),
        (["kill-node"], "found no NODE"),
        (["down", "DIR/x", "--nodes", "3"], "--nodes: unknown option"),
        (["status", "DIR/x", "--down"], "--down: unknown option"),
    ],
)
def test_wrong_use_has_an_error_with_a_fix_and_leaves_nothing(
    arguments: list[str],
    expected: str,
    short_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "missing", list)
    monkeypatch.setattr(
        machine, "_first_used_port", lambda chosen: chosen.port if chosen.port == 1 else None
    )
    assert (
        main(["sandbox", *(argument.replace("DIR", str(short_folder)) for argument in arguments)])
        == EXIT_CONFIG
    )
    message = capsys.readouterr().err
    assert expected in message and message.count("\n") == 1
    assert not list(short_folder.iterdir())


def test_an_unfit_machine_has_an_error_with_a_fix(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = short_folder / "x"
    monkeypatch.setattr(machine, "missing", lambda: ["munged", "slurmctld"])
    with pytest.raises(
        ConfigError, match=r"no munged, slurmctld .*apt-get install .* munge slurm-wlm"
    ):
        cluster.up(folder)
    monkeypatch.setattr(machine, "missing", list)
    monkeypatch.setattr(config_files, "host", lambda: "nowhere.invalid")
    with pytest.raises(ConfigError, match=r"nowhere\.invalid does not resolve, add `127\.0\.0\.1"):
        cluster.up(folder)
    assert not folder.exists()


def fake_prefix(folder: Path, **versions: str) -> Path:
    """A prefix with programs that print these versions, and with the plugin of munge."""
    programs = ("slurmd", "slurmstepd", "scontrol", "sinfo", "squeue", "sbatch", "scancel", "srun")
    for name in ("bin", "sbin", "lib/slurm"):
        (folder / name).mkdir(parents=True)
    (folder / "lib/slurm/auth_munge.so").touch()
    for program in programs:
        versions.setdefault(program, versions.get("slurmctld", "24.11.5"))
    for program, version in versions.items():
        path = folder / "sbin" / program
        path.write_text(f"#!/bin/sh\necho slurm {version}\n")
        path.chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("versions", "expected"),
    [
        ({}, "slurm: found no slurmctld in {prefix}/sbin and {prefix}/bin, allowed: the --prefix"),
        (
            {"slurmctld": "24.11.5", "slurmd": "22.05.8"},
            "slurm: found slurmctld 24.11.5, but slurmd 22.05.8 in {prefix}; install one version",
        ),
        (
            {"slurmctld": "21.08.8"},
            "slurm: found Slurm 21.08.8 in {prefix}, allowed: 22.05 or newer",
        ),
        ({"slurmctld": "?"}, "sbin/slurmctld -V: found 'slurm ?', allowed: a version"),
        (
            {"slurmctld": "25.11.0"},
            "slurm: found Slurm 25.11.0, but {folder} has the state of Slurm 24.11.5; choose",
        ),
    ],
)
def test_a_wrong_prefix_is_refused(
    versions: dict[str, str],
    expected: str,
    short_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "missing", list)
    prefix, folder = fake_prefix(short_folder / "slurm", **versions), short_folder / "x"
    folder.mkdir()
    (folder / config_files.VERSION_FILE).write_text("24.11.5\n")
    assert main(["sandbox", "up", str(folder), "--slurm", str(prefix)]) == EXIT_CONFIG
    message = capsys.readouterr().err
    assert expected.format(prefix=prefix, folder=folder) in message and message.count("\n") == 1
    assert len(list(folder.iterdir())) == 1, "nothing was written"


def test_a_prefix_needs_the_plugin_of_munge(short_folder: Path) -> None:
    prefix = fake_prefix(short_folder / "slurm", slurmctld="24.11.5")
    installation = SlurmInstallation(str(prefix))
    installation.check()
    assert installation.settings() == [f"PluginDir={prefix}/lib/slurm"]
    assert installation.slurmd_options() == ["-d", f"{prefix}/sbin/slurmstepd"]
    assert installation.cgroup_conf() == "CgroupPlugin=disabled\n"
    assert installation.environment()["PATH"].startswith(f"{prefix}/bin:{prefix}/sbin:")
    (prefix / "lib/slurm/auth_munge.so").unlink()
    with pytest.raises(ConfigError, match=r"found no plugin auth_munge\.so in .*libmunge-dev"):
        installation.check()


def test_a_used_port_and_an_unknown_node_are_refused(sandbox: Sandbox) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1] - 1
        # Another program may use the port below.
        message = f"port: ({port}|{port + 1}) of 127.0.0.1 is in use"
        with pytest.raises(ConfigError, match=message), private_sandbox(port=port):
            pass
    with pytest.raises(ConfigError, match="found 'node13', allowed node1 to node12"):
        sandbox.kill_node("node13")
    with pytest.raises(RelaxError, match="invalid partition"):
        sandbox.client("srun", "--partition=none", "true")


def test_extra_lines_replace_settings() -> None:
    text = config_files.slurm_conf(
        Path("/x"), Options(extra=("KillWait=7", "PartitionName=main Nodes=node1", "Licenses=a"))
    )
    assert text.count("KillWait=") == 1 and "KillWait=7\n" in text
    assert text.count("PartitionName=main ") == 1 and text.endswith("Licenses=a\n")


def test_sandboxes_on_different_ports_have_different_job_ids() -> None:
    def first(port: int) -> int:
        text = config_files.slurm_conf(Path("/x"), Options(port=port))
        return next(
            int(line.partition("=")[2])
            for line in text.splitlines()
            if line.startswith("FirstJobId=")
        )

    assert first(41001) - first(41000) == 100 and 0 < first(65471) < 0x03FF0000, (
        "Slurm's default MaxJobId"
    )


SLEEPER = """
import pathlib, signal, sys, time
signal.signal(signal.SIGHUP, lambda *_: pathlib.Path(sys.argv[1]).touch())
print("ready", flush=True)
time.sleep(60)
"""
PARENT_OF_SLEEPER = """
import subprocess, sys
subprocess.run([sys.executable, "-c", *sys.argv[1:]], process_group=0)
"""


def test_no_suspended_process_resumes_when_all_are_killed(tmp_path: Path) -> None:
    """A simulated power loss suspends all processes, then kills them. If a parent ends first, the
    kernel resumes its suspended children."""
    for number in range(10):
        awake = tmp_path / str(number)
        command = [sys.executable, "-c", PARENT_OF_SLEEPER, SLEEPER, str(awake)]
        parent = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        assert parent.stdout.readline() == "ready\n"
        family = processes.families([psutil.Process(parent.pid)])
        assert len(family) == 2
        processes.freeze(family)
        processes.kill(family)
        parent.wait(timeout=10)
        processes.until_gone(family, 10)
        assert not awake.exists()
