"""What the process handling makes of a server that dies, hangs, or cannot start, and of who else is
on the machine."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.effort import effort
from tests.requirements import requires

requires("sglang")

import psutil  # noqa: E402

import tests.rollout.engine_fake_server as fake  # noqa: E402
from relax_hpc.base.errors import ConfigError, RelaxError, find_start_error  # noqa: E402
from relax_hpc.base.last_error import find_last_error  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.cluster.sandbox.processes import command_line  # noqa: E402
from relax_hpc.rollout.engines.engine import EngineFault  # noqa: E402
from relax_hpc.rollout.engines.sglang import process as sglang_process  # noqa: E402
from relax_hpc.rollout.engines.sglang import server as sglang_server  # noqa: E402
from relax_hpc.rollout.engines.sglang.engine import SglangEngine, judge_arguments, server_arguments  # noqa: E402
from relax_hpc.rollout.engines.sglang.session import ProcessSession  # noqa: E402
from tests.base.test_last_error import CONSEQUENCE, SGLANG  # noqa: E402
from tests.helpers.engine_helpers import make_config, request, session_of, start_and_close  # noqa: E402

pytestmark = pytest.mark.run


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what `start` takes for a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the fake server instead of SGLang's."""
    monkeypatch.setattr(sglang_process, "_SERVER", "tests.rollout.engine_fake_server")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


def make_engine(place: Path, **settings: object) -> SglangEngine:
    config = make_config("sglang", **settings)
    return SglangEngine(config, 2, place / "model", Version(1, 0), place / "logs", 2)


def test_a_dead_server_is_told_from_a_broken_connection_and_leaves_no_children(
    place: Path, faked: None
) -> None:
    async def die() -> tuple[EngineFault, str, int]:
        engine = make_engine(place)
        await engine.start()
        leader = engine.server.session.leader.pid
        assert len(session_of(leader)) == 3
        with pytest.raises(EngineFault) as caught:
            await engine.generate(request(fake.EXIT))
        what = await engine.wait_dead()
        await engine.close()
        await engine.close()
        return caught.value, what, leader

    fault, what, leader = asyncio.run(die())
    assert fault.reason == "dead"
    assert "engine-2.log" in str(fault)
    assert what == "the server ended with code 3"
    assert not session_of(leader)


def test_an_error_that_ends_a_server_before_its_first_response_may_recur(
    place: Path, faked: None
) -> None:
    """As one of a missing kernel, which shows when the model first runs."""

    async def die(requests: list[int]) -> tuple[str, str]:
        engine = make_engine(place)
        await engine.start()
        with engine.server.log.open("a") as log:
            log.write(SGLANG)
        try:
            for kind in requests:
                with contextlib.suppress(EngineFault):
                    await engine.generate(request(kind))
            await engine.wait_dead()
            with pytest.raises(EngineFault) as caught:
                await engine.generate(request(fake.GOOD))
            return engine.start_error, find_start_error(caught.value)
        finally:
            await engine.close()

    quote = find_last_error(SGLANG).text
    assert asyncio.run(die([fake.EXIT])) == (quote, quote)
    assert asyncio.run(die([fake.GOOD, fake.EXIT])) == ("", "")


def test_who_waits_for_a_dying_server_can_be_cancelled_at_that_moment(
    place: Path, faked: None
) -> None:
    """As the role does with its other tasks once one of them has seen the end."""

    async def die() -> tuple[bool, bool]:
        engine = make_engine(place)
        await engine.start()
        asked = asyncio.create_task(engine.generate(request(fake.HANG)))
        engine.server.session.leader.kill()
        await engine.wait_dead()
        in_time = asked.cancel()
        await asyncio.wait([asked], timeout=60)
        await engine.close()
        return in_time, asked.cancelled()

    in_time, cancelled = asyncio.run(die())
    assert cancelled or not in_time


def test_the_server_is_nobodys_rank_and_does_not_see_its_key(
    place: Path, faked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = (
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "PMI_RANK",
        "PMIX_ID",
        "OMPI_COMM_WORLD",
    )
    for name in ranks:
        monkeypatch.setenv(name, "1")

    async def environment() -> tuple[str, dict[str, str]]:
        engine = make_engine(place)
        await engine.start()
        try:
            return engine.server.key_file.read_text(), await engine._client._call(
                "/environment", None, 5.0
            )
        finally:
            await engine.close()

    key, found = asyncio.run(environment())
    assert not found.keys() & set(ranks)
    assert found["OMP_NUM_THREADS"] == "1"
    assert len(key) == 64 and key not in str(found)
    assert found["PATH"] == os.environ["PATH"]


def test_a_server_dies_with_the_role_that_started_it() -> None:
    tie = (
        "import os, sys; from relax_hpc.net.rendezvous.process import die_with_parent; "
        "die_with_parent()"
    )
    server = f"{tie}; print(os.getpid(), flush=True); sys.stdin.read()"
    role = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {server!r}])"
    root = Path(__file__).parents[2]
    process = subprocess.Popen(
        [sys.executable, "-c", role], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with process:
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        child.wait(timeout=60)


def test_a_part_that_dies_is_the_end_of_the_server(place: Path, faked: None) -> None:
    """At once, and for those that wait for an answer; what comes and goes beside the parts is
    nobody's end."""

    async def scene() -> tuple[str, str]:
        engine = make_engine(place)
        await engine.start()
        parts = {
            words[0]: process
            for process in session_of(engine.server.session.leader.pid)
            if (words := command_line(process))
        }
        helper = os.pidfd_open(parts["helper"].pid)
        parts["helper"].kill()
        assert select.select([helper], [], [], 60.0)[0]
        os.close(helper)
        await engine.generate(request(fake.GOOD))
        asked = asyncio.create_task(engine.generate(request(fake.HANG)))
        parts["sglang::part"].kill()
        async with asyncio.timeout(60.0):
            said = await engine.wait_dead()
            with pytest.raises(EngineFault) as caught:
                await asked
        await engine.close()
        assert caught.value.reason == "dead" and not session_of(engine.server.session.leader.pid)
        return said, str(caught.value)

    said, fault = asyncio.run(scene())
    assert "sglang::part" in said and said in fault


def test_processes_that_a_security_module_hides_are_no_members(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SELinux may say nothing of other people's sessions."""
    getsid = os.getsid

    def hiding(pid: int) -> int:
        if pid == os.getppid():
            raise PermissionError(1, "Operation not permitted")
        return getsid(pid)

    monkeypatch.setattr(os, "getsid", hiding)
    session = object.__new__(ProcessSession)
    session.leader = SimpleNamespace(pid=getsid(0))
    members = {process.pid for process in session.members()}
    assert os.getpid() in members and os.getppid() not in members


SQUATTER = """
import socket, sys
with socket.socket() as taken:
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        taken.bind(("127.0.0.1", int(sys.argv[1])))
        taken.listen()
    except OSError:
        sys.exit("refused")
"""


@pytest.mark.root
def test_nobody_can_take_the_port_of_a_server_that_starts(place: Path, faked: None) -> None:
    """As any user could who sets SO_REUSEADDR, while it was bound and did not listen; then he was
    sent the key.

    The real attack needs another user: root makes one up, others try it as themselves, which is
    easier for them.
    """
    os.mkfifo(place / "model" / "hold")
    who = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}

    async def scene() -> subprocess.CompletedProcess:
        engine = make_engine(place)
        starting = asyncio.create_task(engine.start())
        writer = await asyncio.to_thread(os.open, place / "model" / "hold", os.O_WRONLY)
        words = ["/usr/bin/python3", "-c", SQUATTER, str(engine.server.arguments["port"])]
        tried = await asyncio.to_thread(
            subprocess.run, words, **who, capture_output=True, text=True, timeout=30
        )
        assert not starting.done()
        os.close(writer)
        await starting
        await engine.generate(request(fake.GOOD))
        await engine.close()
        return tried

    tried = asyncio.run(scene())
    assert tried.returncode == 1 and tried.stderr == "refused\n"


def test_nobody_else_gets_the_port_of_a_dead_server(place: Path, faked: None) -> None:
    """Whoever had it could answer, and would be sent the key with the next request."""

    async def scene() -> str:
        engine = make_engine(place)
        await engine.start()
        engine.server.session.leader.kill()
        await engine.wait_dead()
        address = ("127.0.0.1", engine.server.arguments["port"])
        with pytest.raises(OSError, match="address already in use"):
            await asyncio.start_server(lambda *both: None, *address)
        with pytest.raises(EngineFault) as caught:
            await engine.generate(request(fake.GOOD))
        reader, writer = await asyncio.open_connection(*address)
        async with asyncio.timeout(10.0):
            assert await reader.read() == b"", "closed at once"
        writer.close()
        await engine.close()
        return str(caught.value)

    assert "dead: the server ended with code -9" in asyncio.run(scene())


MAPS = r"""
import mmap, os, subprocess, sys
part = "import mmap, sys, time; file = open(sys.argv[1], 'wb+'); file.truncate(4096)\n"
part += "with mmap.mmap(file.fileno(), 4096): print('mapped', flush=True); time.sleep(60)"
with subprocess.Popen([sys.executable, "-c", part, sys.argv[1]], stdout=subprocess.PIPE) as child:
    child.stdout.readline()
    os.write(1, b"mapped")
    os.read(0, 1)
    os._exit(3)
"""


def test_memory_that_a_server_took_late_is_known_when_it_has_died() -> None:
    path = Path(f"/dev/shm/sglang_test_{os.getpid()}")

    async def scene() -> set[Path]:
        pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
        words = (sys.executable, "-c", MAPS, str(path))
        leader = await asyncio.create_subprocess_exec(*words, start_new_session=True, **pipes)
        session = ProcessSession(leader)
        assert leader.stdin and leader.stdout
        async with asyncio.timeout(20):
            await leader.stdout.readexactly(6)
            leader.stdin.write(b"x")
            assert await session.ended == "the server ended with code 3"
        _, alive = psutil.wait_procs(session.members(), timeout=60)
        assert not alive
        return session.shared_memory()

    try:
        assert asyncio.run(scene()) == {path}
    finally:
        path.unlink(missing_ok=True)


def test_a_busy_port_is_tried_again(place: Path) -> None:
    """The server of the incarnation before may have it for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            EngineFault, match=rf"rollout\.engine\.port: {port} is in use"
        ) as caught:
            start_and_close(make_engine(place, port=port - 2))
    assert find_start_error(caught.value) == ""


def test_a_missing_model_is_named(place: Path) -> None:
    (place / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .*model has no config\.json"):
        start_and_close(make_engine(place))


def test_flags_that_are_the_engines_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"flags\.port: not allowed; set rollout\.engine\.port"):
        make_engine(place, flags={"port": 30000})
    with pytest.raises(ConfigError, match=r"flags\.grpc_port: not allowed; it cannot be changed"):
        make_engine(place, flags={"grpc_port": 30001})
    with pytest.raises(
        ConfigError, match=r"flags\.gpu_id_step: found 2, allowed: 1; .*; leave out the flag"
    ):
        make_engine(place, flags={"gpu_id_step": 2})


def test_flags_override_what_the_device_sets(place: Path) -> None:
    assert make_engine(place).server.arguments["disable_radix_cache"]
    flags = {"max_total_tokens": 99, "disable_radix_cache": False}
    arguments = make_engine(place, flags=flags, port=4000).server.arguments
    assert (arguments["max_total_tokens"], arguments["disable_radix_cache"], arguments["port"]) == (
        99,
        False,
        4002,
    )


def test_each_replica_has_gpus_of_its_own(place: Path) -> None:
    config = make_config("sglang", flags={"tp_size": 2})
    config.model.device = "cuda"
    assert server_arguments(config, 2, place, Version(1, 0))["base_gpu_id"] == 4
    arguments = server_arguments(config, 2, place, Version(1, 0), local_number=0)
    assert arguments["base_gpu_id"] == 0 and arguments["random_seed"] == config.seed + 2, (
        "first of another node"
    )
    config.rollout.engine.flags["base_gpu_id"] = 1
    assert server_arguments(config, 2, place, Version(1, 0))["base_gpu_id"] == 5, (
        "from the first GPU that is named"
    )
    config.rollout.engine.flags = {"tp_size": 2, "dp_size": 2}
    assert server_arguments(config, 1, place, Version(1, 0))["base_gpu_id"] == 4
    config.genrm.flags = {"dp_size": 4}
    assert judge_arguments(config, 1, "127.0.0.1", 1)["base_gpu_id"] == 4


@pytest.mark.parametrize("saver", [True, False])
def test_expandable_segments_are_left_out_for_a_memory_saver_alone(
    place: Path,
    faked: None,
    saver: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """torch_memory_saver raises an error if they are on, and the server dies while it starts."""
    both = "max_split_size_mb:128,expandable_segments:True"
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", both)
    engine = make_engine(place, flags={"enable_memory_saver": True} if saver else {})

    async def environment_of_server() -> dict[str, str]:
        try:
            await engine.start()
            return psutil.Process(engine.server.session.leader.pid).environ()
        finally:
            await engine.close()

    settings = asyncio.run(environment_of_server())["PYTORCH_CUDA_ALLOC_CONF"]
    assert settings == ("max_split_size_mb:128" if saver else both)
    assert (
        f"engine-2: PYTORCH_CUDA_ALLOC_CONF={both}: without expandable" in capsys.readouterr().out
        or not saver
    )


@pytest.mark.parametrize(
    ("flags", "private"), [({}, True), ({"dp_size": 1, "nnodes": 1}, True), ({"dp_size": 2}, False)]
)
def test_ranks_of_one_server_meet_in_memory_also_where_its_flags_say_that_they_are_one_group(
    flags: dict, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own store listens on every interface."""
    for name in (
        override := "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE",
        "GLOO_SOCKET_IFNAME",
        "NCCL_SOCKET_IFNAME",
    ):
        monkeypatch.setenv(name, "")
    sglang_server._use_private_rendezvous(flags)
    assert os.environ[override].startswith("file:///proc/") == private


@pytest.mark.skipif(
    not effort(0, 1),
    reason="test_bad_input.py has a whole run end by it; alone: env/test.sh --all, or "
    "RELAX_WHOLE=1",
)
def test_an_unknown_flag_is_refused_with_the_nearest(place: Path) -> None:
    """By SGLang's own list, in the server process."""
    with pytest.raises(ConfigError) as caught:
        start_and_close(make_engine(place, flags={"max_total_token": 99}))
    expected = "SGLang has no such server argument; the nearest is max_total_tokens"
    assert str(caught.value) == f"rollout.engine.flags.max_total_token: {expected}"


def test_a_server_that_cannot_start_is_dead_and_its_log_named(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_process, "_SERVER", "tests.no_such_module")
    text = r"while starting; its log ends with .*No module named .*; see .*engine-2\.log"
    with pytest.raises(EngineFault, match=f"ended with code 1 {text}") as caught:
        start_and_close(make_engine(place))
    assert caught.value.reason == "dead" and find_start_error(caught.value) == ""
    assert "no_such_module" in (place / "logs" / "engine-2.log").read_text()


def test_the_last_error_of_a_server_is_quoted(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an earlier server has left another error in the same log."""
    monkeypatch.setattr(sglang_process, "_SERVER", "tests.rollout.engine_failing_server")
    (place / "logs").mkdir(exist_ok=True)
    (place / "logs" / "engine-2.log").write_text(CONSEQUENCE.replace("EOFError", "OSError: old"))
    with pytest.raises(EngineFault) as caught:
        start_and_close(make_engine(place, flags={"prints": SGLANG + CONSEQUENCE}))
    quote = find_last_error(SGLANG).text
    assert f"ended with code -9 while starting: {quote}; see " in str(caught.value)
    assert find_start_error(RelaxError("the role")) == ""
    role_error = RelaxError("the role")
    role_error.__cause__ = caught.value
    assert find_start_error(role_error) == quote


def test_an_error_that_may_pass_is_quoted_and_tried_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_process, "_SERVER", "tests.rollout.engine_failing_server")
    log = SGLANG.replace(find_last_error(SGLANG).text, "OSError: [Errno 98] Address already in use")
    with pytest.raises(EngineFault, match="Address already in use") as caught:
        start_and_close(make_engine(place, flags={"prints": log}))
    assert find_start_error(caught.value) == ""


def test_server_arguments_that_sglang_refuses_are_a_mistake_of_the_configuration(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sglang_process, "_SERVER", "tests.rollout.engine_failing_server")
    log = SGLANG.replace("scheduler.py", "server_args.py")
    text = "rollout.engine.flags: SGLang refuses them: ValueError: Loaded"
    with pytest.raises(ConfigError, match=text):
        start_and_close(make_engine(place, flags={"prints": log}))


def test_a_server_that_never_gets_healthy_is_dead_and_gone(place: Path, faked: None) -> None:
    engine = make_engine(place, start_timeout_s=0.01)
    with pytest.raises(EngineFault, match=r"start_timeout_s = 0\.01") as caught:
        start_and_close(engine)
    assert caught.value.reason == "dead"
    assert not session_of(engine.server.session.leader.pid)
