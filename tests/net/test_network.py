"""Addresses between nodes: loopback in the local layout, the configured interface elsewhere, never
a guess."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from relax_hpc.base.errors import EXIT_RETRY, ConfigError, DeadlineError, RelaxError
from relax_hpc.base.metrics import spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.cluster.supervise.launch_records import read_mark
from relax_hpc.cluster.supervise.processes import kill_processes, process_tree, role_arguments
from relax_hpc.config import dump, load
from relax_hpc.config.schema import Config, GroupConfig
from relax_hpc.net.rendezvous import network
from relax_hpc.net.rendezvous.network import interface_address, library_environment, own_address
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.roles.__main__ import connect_timeout_s
from relax_hpc.roles.prepare import prepare
from tests.helpers.containers import PYTHON, install, make_image
from tests.helpers.queue_helpers import BUDGET, Roles, in_thread, make_run
from tests.helpers.run_helpers import LIGHT, write_config
from tests.helpers.weights_helpers import publish
from tests.requirements import mpiexec, requires

pytestmark = pytest.mark.run

LOOPBACK_NAME = next(name for _, name in socket.if_nameindex() if name.startswith("lo"))


def het(**site: str) -> Config:
    config = Config(layout="het")
    for name, value in site.items():
        setattr(config.site, name, value)
    return config


def named(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Let this host's own name resolve to `address`; empty: it does not."""

    def resolve(_: str) -> str:
        if not address:
            raise socket.gaierror(-2, "Name or service not known")
        return address

    monkeypatch.setattr(network.socket, "gethostbyname", resolve)


def test_the_local_layout_stays_on_loopback() -> None:
    config = Config()
    config.site.interface = "nowhere0"
    assert own_address(config, "hub") == "127.0.0.1" and library_environment(config, "hub") == {}


def test_an_unknown_interface_is_named_with_those_that_exist() -> None:
    assert interface_address(LOOPBACK_NAME) == "127.0.0.1"
    with pytest.raises(
        ConfigError, match=rf"'nowhere0', allowed on host .*{LOOPBACK_NAME} \(127\.0\.0\.1\)"
    ):
        own_address(het(interface="nowhere0"), "hub")


def test_the_groups_own_interface_goes_before_the_sites() -> None:
    config = het(interface="nowhere0")
    config.groups["actor"].interface = LOOPBACK_NAME
    assert own_address(config, "actor") == "127.0.0.1"
    config.groups["rollout"] = GroupConfig(roles=["rollout"], interface=LOOPBACK_NAME)
    assert own_address(config, "rollout-2") == "127.0.0.1", (
        "an elastic member has its group's settings"
    )


def test_without_an_interface_the_hosts_name_counts_unless_it_is_loopback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    named(monkeypatch, "192.0.2.7")
    assert own_address(het(), "hub") == "192.0.2.7"
    for address in ("127.0.1.1", "127.0.0.1"):
        named(monkeypatch, address)
        with pytest.raises(
            ConfigError, match=rf"site.interface: .* resolves to {address}.*; set it"
        ):
            own_address(het(), "hub")
    named(monkeypatch, "")
    with pytest.raises(ConfigError, match=r"site.interface: .* does not resolve; set it"):
        own_address(het(), "hub")


def test_a_host_with_ipv6_alone_is_told_that_ipv4_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_ipv4(name: str) -> str:
        raise socket.gaierror(socket.EAI_NODATA, "no address")

    six = [(socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("fd00::7", 0, 0, 0))]
    monkeypatch.setattr(socket, "gethostbyname", no_ipv4)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: six)
    with pytest.raises(
        ConfigError, match="resolves to the IPv6 address fd00::7 alone; IPv4 is needed"
    ):
        own_address(Config(layout="het"), "rollout")


def test_libraries_are_kept_on_the_interface_unless_the_user_chose() -> None:
    config = het(interface="ib0")
    found = library_environment(config, "actor")
    assert (
        found["GLOO_SOCKET_IFNAME"]
        == found["OMPI_MCA_btl_tcp_if_include"]
        == found["FI_TCP_IFACE"]
        == "ib0"
    )
    assert found["NCCL_SOCKET_IFNAME"] == "=ib0"
    config.site.env = {"GLOO_SOCKET_IFNAME": "ib1"}
    config.groups["actor"].env = {"NCCL_SOCKET_IFNAME": "eth"}
    left = library_environment(config, "actor")
    assert found.keys() - left.keys() == {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"}
    assert library_environment(het(), "actor") == {}


RANK = """
import os, signal, sys
from relax_hpc.config.schema import MpiConfig
from relax_hpc.net.rendezvous.process import die_with_parent
from relax_hpc.net.rendezvous.world import join_world
die_with_parent()
world = join_world("127.0.0.1", 3, MpiConfig(), 60.0)
assert "mpi4py" not in sys.modules and "RELAX_MEETING" not in os.environ
assert [card["node"] for card in world.cards] == [world.cards[0]["node"]] * 3
assert world.cards[world.rank]["pid"] == os.getpid() and world.local_rank == world.rank
os.write(1, str(world.rank).encode())
if world.rank == 1:
    exec(sys.argv[1])
elif "pass" not in sys.argv[1]:
    signal.pause()
"""


@pytest.mark.parametrize(
    ("end", "code", "said"),
    [
        ("pass", 0, ""),
        ("sys.exit(78)", 78, "rank 1 ended with code 78"),
        ("os.abort()", 75, "rank 1 was ended by"),
    ],
)
def test_ranks_of_one_node_meet_without_mpi_and_end_together(
    end: str, code: int, said: str
) -> None:
    words = [sys.executable, "-m", "relax_hpc.cluster.supervise.ranks", "3", "-c", RANK, end]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == code and said in done.stderr, done.stderr
    assert code or sorted(done.stdout) == ["0", "1", "2"]


def test_ranks_of_one_node_are_told_signals_and_die_with_their_launcher() -> None:
    script = (
        "import signal, sys; signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0)); "
        "os.write(1, b'1')\n"
    )
    words = [
        sys.executable,
        "-m",
        "relax_hpc.cluster.supervise.ranks",
        "2",
        "-c",
        RANK.partition("world =")[0] + script,
    ]
    for number, code in ((signal.SIGUSR2, 0), (signal.SIGKILL, -9)):
        launcher = subprocess.Popen(
            [*words[:-1], words[-1] + "signal.pause()"], stdout=subprocess.PIPE
        )
        assert launcher.stdout.read(2) == b"11"
        ranks = psutil.Process(launcher.pid).children()
        launcher.send_signal(number)
        assert launcher.wait(30) == code
        launcher.stdout.close()
        assert not psutil.wait_procs(ranks, timeout=10.0)[1]


def test_ranks_are_counted_by_slurms_name_of_their_node(tmp_path: Path) -> None:
    """Nodes may share a host name; a rank takes the GPU of its number on its own node."""
    requires("mpi")
    script = (
        "import sys; from relax_hpc.config.schema import MpiConfig; from "
        "relax_hpc.net.rendezvous.world import join_world\n"
    )
    script += "world = join_world('127.0.0.1', 3, MpiConfig(), 60.0)\n"
    script += "open(f'{sys.argv[1]}/{world.rank}', 'w').write(str(world.local_rank))"
    words = [str(mpiexec()), "-verbose"]
    for node in ("n1", "n1", "n2"):
        words += [":"] if len(words) > 2 else []
        words += [
            "-n",
            "1",
            "-env",
            "SLURMD_NODENAME",
            node,
            sys.executable,
            "-c",
            script,
            str(tmp_path),
        ]
    said = subprocess.run(words, timeout=60, check=True, stdout=subprocess.PIPE, text=True).stdout
    assert len(re.findall(r"cmd=finalize$", said, re.M)) == 3, (
        "a rank that does not say goodbye ends all"
    )
    assert [(tmp_path / str(rank)).read_text() for rank in range(3)] == ["0", "1", "0"]


@pytest.mark.parametrize(
    ("library", "error", "words"),
    [
        ("import os; os._exit(1)", RelaxError, "MPI_Init ended the process with code 1"),
        ("import os; os.kill(os.getpid(), 6)", RelaxError, "MPI_Init was ended by signal 6"),
        (
            "raise RuntimeError('cannot load MPI library')",
            RelaxError,
            "MPI_Init ended the process with code 1",
        ),
        (
            "import time; time.sleep(600)",
            DeadlineError,
            "the ranks of the group have not met within 0 s",
        ),
        # Of another MPI than the launcher's each rank takes itself for all.
        ("", ConfigError, "MPI_Init found 1 ranks, allowed: the 2 that were started"),
    ],
)
def test_an_mpi_that_fails_ends_in_one_line_that_names_the_setting(
    library: str, error: type[RelaxError], words: str, tmp_path: Path
) -> None:
    """It ends its process, as MPI_Init does where it finds no launcher that it knows."""
    if not library:
        requires("mpi")
    (tmp_path / "mpi4py.py").write_text(library)
    script = (
        "from relax_hpc.config.schema import MpiConfig; from relax_hpc.base.errors import "
        "RelaxError\n"
    )
    script += "from relax_hpc.net.rendezvous.world import join_world\n"
    script += (
        f"try: join_world('127.0.0.1', 2, MpiConfig(), {0.3 if error is DeadlineError else 60.0})\n"
    )
    script += "except RelaxError as error: print(type(error).__name__, error)"
    paths = [str(tmp_path)] * bool(library) + [str(Path(__file__).parents[2])]
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    said = done.stdout.strip()
    assert said.startswith(
        f"{error.__name__} site.mpi: with library wheel and launcher pmi2: {words}"
    ), done.stderr
    assert error is DeadlineError or (
        "site.mpi.library and site.mpi.launcher" in said and "\n" not in said
    )


@pytest.mark.parametrize("inside", [False, True])
def test_ranks_that_hang_in_mpi_say_so_before_they_are_taken_for_dead(
    inside: bool, tmp_path: Path
) -> None:
    """In a container as well as outside; whoever supervises them gives up on who does not beat, and
    knows no cause."""
    requires("transformers", *["bubblewrap"] * inside)
    (tmp_path / "mpi4py.py").write_text("import time; time.sleep(600)")
    run = make_run(tmp_path / "run")
    over = {
        "layout": "jobs",
        "groups": {"rollout": {"resources": {"nodes": 2}}},
        "rollout": {"replicas": 2},
    }
    over |= {
        "liveness": {"start_timeout_s": 3.0},
        "site": {"interface": LOOPBACK_NAME, "mpi": {"launcher": "pmi2"}},
    }
    dump(load([write_config(tmp_path / "config.yaml", over)]), run.config)
    root = Path(__file__).parents[2]
    run.logs("rollout", claim_incarnation(run, "rollout")).mkdir(parents=True)
    words = [sys.executable]
    if inside:
        program, image = install(tmp_path / "bin"), make_image(tmp_path / "image")
        words = [
            str(program),
            "exec",
            "--no-home",
            f"--bind={tmp_path}",
            f"--bind={root}",
            str(image),
            PYTHON,
        ]
    subprocess.run(
        [*words, *role_arguments(run, "rollout", "rollout", 1), "--watch"],
        env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{root}"},
        timeout=120,
        capture_output=True,
    )
    mark = read_mark(run, "rollout", 1, "rollout")
    what = (
        r"site\.mpi: with library wheel and launcher pmi2: the ranks of the group have not met "
        r"within [12] s; .*logs"
    )
    assert re.fullmatch(what, mark["reason"]) and mark["code"] == EXIT_RETRY


def test_ranks_look_for_each_other_for_less_than_they_may_take_to_begin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Less what they have taken for imports, from a slow filesystem."""
    config, limit_s = Config(), Config().liveness.start_timeout_s
    for age_s in (0.0, limit_s / 4):
        monkeypatch.setattr(
            spans, "process_start_time", lambda age_s=age_s: time.monotonic() - age_s
        )
        assert 0.5 * limit_s < connect_timeout_s(config) + age_s < 0.8 * limit_s
    monkeypatch.setattr(spans, "process_start_time", lambda: time.monotonic() - limit_s)
    assert connect_timeout_s(config) > 0.0


def test_a_rollout_of_two_ranks_generates_evaluates_once_and_ends(tmp_path: Path) -> None:
    """As on two nodes: every rank has its own replicas and its own line to the queue."""
    requires("mpi", "torch", "transformers")
    over = {"layout": "jobs", "steps": 4, "site": {"interface": LOOPBACK_NAME}}
    over |= {
        "rollout": {"replicas": 2, "groups_per_request": 1, "requests_in_flight": 1}
        | LIGHT["rollout"]
    }
    over |= {
        "groups": {"rollout": {"resources": {"nodes": 2}}, "reference": {}},
        "eval": {"every": 1, "samples": 4},
    }
    config = load([write_config(tmp_path / "config.yaml", over)])
    run = make_run(tmp_path / "run")
    dump(config, run.config)
    prepare(run, config)
    logs = run.logs("rollout", claim_incarnation(run, "rollout"))
    logs.mkdir(parents=True)
    evaluated: list[int] = []
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        hub.service.on_report = lambda role, step, *_: (
            evaluated.append(step) if role == "eval" else None
        )
        roles["rollout"].close()
        with two_ranks(run, logs / "launcher.txt") as ranks:
            for step in range(config.steps):
                train(run, roles, step)
            assert ranks.wait(60) == 0, "\n".join(
                path.read_text() for path in logs.glob("*.[lt][ox][gt]")
            )
        readers = sorted(hub.state.weights.readers)
    assert len(readers) == 2, f"each rank's replica serves on its own line: {readers}"
    assert evaluated == sorted(set(evaluated)) and evaluated[-1] == config.steps
    assert read_mark(run, "rollout", 1, "rollout")["status"] == "done"
    written = [(logs / f"spans-rollout-{rank}.jsonl").read_text() for rank in range(2)]
    assert any('"generate"' in text for text in written), "which rank got the tickets is chance"


@contextmanager
def two_ranks(run: RunDir, output: Path) -> Iterator[subprocess.Popen]:
    """Rollout ranks under an MPI launcher; srun needs no word to leave the others be when one of
    them ends well."""
    words = [str(mpiexec()), "-disable-auto-cleanup", "-n", "2", sys.executable]
    with output.open("wb") as file:
        ranks = subprocess.Popen(
            [*words, *role_arguments(run, "rollout", "rollout", 1)], stdout=file, stderr=file
        )
    try:
        yield ranks
    finally:
        kill_processes(process_tree(ranks.pid))
        ranks.wait(60)


def ready(ranks: subprocess.Popen, roles: Roles) -> None:
    """Wait until both replicas serve, so that both have a share of the steps that come."""
    deadline = time.monotonic() + 60
    while sorted(roles["actor"].connection.call("status")["readers"]) != ["rollout/0", "rollout/1"]:
        assert time.monotonic() < deadline and ranks.poll() is None
        time.sleep(0.02)


def train(run: RunDir, roles: Roles, step: int) -> None:
    """What the other groups do in a step, with the weights that the run began with; the last one is
    saved."""
    version = Version(1, step)
    if step == 0:
        roles["actor"].connection.call("resume", step=0)
        publish_start(run, roles, version)
    roles.learn(version)
    claim = roles["actor"].claim("actor", BUDGET)
    publish_start(run, roles, Version(1, step + 1))
    roles["actor"].connection.call("trained", step=step, leases=[claim.lease])
    if step + 1 == roles.config.steps:
        roles["actor"].connection.call("checkpoint", step=step + 1, name="last", digest="d")


def publish_start(run: RunDir, roles: Roles, version: Version) -> None:
    from safetensors.torch import load_file

    publish(run, roles["actor"], version, load_file(run.model / "model.safetensors"))
