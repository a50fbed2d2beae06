"""What the client and the process handling make of a server that fails, lies, hangs or dies."""

from __future__ import annotations

import asyncio
import os
import select
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.effort import effort
from tests.requirements import requires

requires("sglang")

import numpy as np  # noqa: E402
import psutil  # noqa: E402
from aiohttp.test_utils import TestServer  # noqa: E402

import tests.engine_fake_server as fake  # noqa: E402
from relax_hpc import local_dir  # noqa: E402
from relax_hpc.engines.engine import BadAnswer, Draft, EngineFault, GenerateRequest, Generation, Sampling  # noqa: E402
from relax_hpc.engines.sglang import engine as sglang_engine  # noqa: E402
from relax_hpc.engines.sglang import server as sglang_server  # noqa: E402
from relax_hpc.engines.sglang.client import SglangClient  # noqa: E402
from relax_hpc.engines.sglang.engine import SglangEngine, server_arguments  # noqa: E402
from relax_hpc.engines.sglang.session import Session  # noqa: E402
from relax_hpc.errors import ConfigError  # noqa: E402
from relax_hpc.local_dir import LOCAL_DIR, Scratch  # noqa: E402
from relax_hpc.versions import Version  # noqa: E402
from tests.engine_helpers import TOKEN, make_config, session_of  # noqa: E402

pytestmark = pytest.mark.run

SAMPLING = Sampling(1.0, 1.0, (), 0)
SERVED = Version(1, 3)
"""What a fake server says that it serves, before the ends of its responses."""


@asynccontextmanager
async def client_and_server(**settings: float) -> AsyncIterator[tuple[SglangClient, TestServer]]:
    """A client of a fake server in this process."""
    server = TestServer(fake.application(TOKEN))
    await server.start_server()
    client = SglangClient(str(server.make_url("/")), TOKEN, make_config("sglang", **settings).rollout.engine, SERVED)
    try:
        yield client, server
    finally:
        await client.close()
        await server.close()


def request(kind: int, sample: int = 0, draft: Draft | None = None) -> GenerateRequest:
    return GenerateRequest((kind, 5), "p", sample, SAMPLING, 4, draft=draft)


def ask(*kinds: int, served: Version = SERVED, **settings: float) -> list[Generation | EngineFault]:
    """The client's answers to requests of each kind, which come at once."""

    async def generate() -> list[Generation | EngineFault]:
        async with client_and_server(**settings) as (client, _):
            client._version = served
            return await asyncio.gather(*(client.generate(request(kind)) for kind in kinds), return_exceptions=True)

    return asyncio.run(generate())


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (fake.STATUS_500, "http_error"),
        (fake.NOT_JSON, "http_error"),
        (fake.MISSING, "wrong_count"),
        (fake.NO_INDEX, "http_error"),
        (fake.ERROR, "http_error"),
        (fake.NUMBER, "http_error"),
        (fake.HANG, "timeout"),
    ],
)
def test_a_broken_exchange_fails_what_has_no_answer_yet(kind: int, reason: str) -> None:
    _, fault = ask(fake.GOOD, kind, request_timeout_s=0.3)
    assert type(fault) is EngineFault and fault.reason == reason


def test_an_answer_that_is_there_is_no_longer_held_by_others_that_fail() -> None:
    good, fault = ask(fake.GOOD, fake.HANG, request_timeout_s=0.3)
    assert isinstance(good, Generation) and isinstance(fault, EngineFault)


def test_an_answer_may_take_longer_than_the_engine_may_be_silent() -> None:
    (answer,) = ask(fake.SLOW, request_timeout_s=2.5 * fake.PAUSE_S)
    assert isinstance(answer, Generation) and len(answer.token_ids) == 4


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (fake.FEW_LOGPROBS, "wrong_count"),
        (fake.TOO_MANY, "wrong_count"),
        (fake.EMPTY, "wrong_count"),
        (fake.NULL, "nan_logprob"),
        (fake.POSITIVE, "nan_logprob"),
        (fake.NO_VERSION, "unknown_version"),
        (fake.BAD_VERSION, "unknown_version"),
        (fake.GAP, "unknown_version"),
        (fake.MALFORMED, "http_error"),
        (fake.ABORTED, "http_error"),
    ],
)
def test_a_bad_answer_is_a_fault_of_its_own(kind: int, reason: str) -> None:
    first, second, third = ask(fake.GOOD, kind, fake.GOOD)
    assert isinstance(second, BadAnswer)
    assert second.reason == reason
    assert isinstance(first, Generation)
    assert isinstance(third, Generation)


def test_versions_come_from_spans_or_from_the_one_version() -> None:
    one, spans = ask(fake.GOOD, fake.SPANS)
    new, old = Version(1, 4).encode(), Version(1, 3).encode()
    assert one.token_versions.tolist() == [new] * 4
    assert spans.token_versions.tolist() == [old, old, new, new]


def test_tokens_of_older_weights_than_those_served_are_a_fault() -> None:
    (fault,) = ask(fake.GOOD, served=Version(1, 5))
    assert type(fault) is EngineFault and fault.reason == "old_version"
    assert "found tokens of i000001-v000004 from an engine that serves i000001-v000005" in str(fault)


def drafts_after(*kinds: int, served: Version = SERVED) -> list[Draft]:
    """What requests of these kinds have left in their drafts, of which the first has a token from before."""
    before = Generation([3], [-0.1], np.array([Version(1, 2).encode()], np.int32), "partial")
    drafts = [Draft.of(before), *(Draft() for _ in kinds[1:])]
    requests = [request(kind, k, drafts[k]) for k, kind in enumerate(kinds)]

    async def generate() -> None:
        async with client_and_server(request_timeout_s=1.0) as (client, _):
            client._version = served
            await asyncio.gather(*map(client.generate, requests), return_exceptions=True)

    asyncio.run(generate())
    return drafts


def test_what_a_server_told_before_it_failed_is_in_the_drafts() -> None:
    """Two tokens of each are told, then all of the first; the last one's end never comes."""
    first, second = drafts_after(fake.SPANS, fake.HANG)
    assert first.ended and first.ended.finish_reason == "length"
    assert first.ended.token_ids == [3, 7, 7, 7]
    assert first.ended.token_versions.tolist() == [Version(1, n).encode() for n in (2, 3, 3, 4)]
    assert not second.ended and second.so_far().token_ids == [7, 7] and second.so_far().logprobs == [-0.5, -0.5]
    assert second.token_versions == [SERVED.encode()] * 2


def test_tokens_that_may_be_of_other_weights_wait_for_the_end_of_the_response() -> None:
    first, second = drafts_after(fake.GOOD, fake.HANG, served=Version(1, 2))
    assert first.ended and first.ended.token_ids == [3, 7, 7, 7]
    assert not second.ended and second.token_ids == []


def test_of_a_response_that_is_whole_nothing_is_asked() -> None:
    whole = Draft.of(Generation([3] * 4, [-0.1] * 4, np.ones(4, np.int32), "partial"))

    async def generate() -> Generation:
        async with client_and_server() as (client, _):
            return await client.generate(request(fake.STATUS_500, draft=whole))

    answer = asyncio.run(generate())
    assert answer is whole.ended and answer.finish_reason == "length"


def test_only_an_update_beside_running_requests_pauses_the_server() -> None:
    async def updates() -> list[str]:
        async with client_and_server() as (client, server):
            await client.generate(request(fake.GOOD))
            await client.update_weights(Path("weights"), Version(1, 5))
            hanging = asyncio.create_task(client.generate(request(fake.HANG)))
            async with asyncio.timeout(10):
                await server.app[fake.HANGING].wait()
            await client.update_weights(Path("weights"), Version(1, 6))
            hanging.cancel()
            return server.app[fake.CALLS]

    calls = asyncio.run(updates())
    assert calls == ["/freeze_gc", "i000001-v000005", "/pause_generation", "i000001-v000006", "/continue_generation"]


def test_a_server_that_does_not_give_requests_up_is_not_asked_to_flush_or_release() -> None:
    """It goes on with what nobody waits for any more, and says that it is not idle."""

    async def updates() -> list[str]:
        async with client_and_server(update_timeout_s=0.2) as (client, server):
            hanging = asyncio.create_task(client.generate(request(fake.HANG)))
            async with asyncio.timeout(10):
                await server.app[fake.HANGING].wait()
            hanging.cancel()
            await asyncio.wait([hanging])
            assert hanging.cancelled() and not client.gate.inside
            await client.update_weights(Path("weights"), Version(1, 6))
            with pytest.raises(EngineFault, match=r"requests that were given up are drawn still, after 0\.2 s"):
                await client.release()
            return server.app[fake.CALLS]

    assert asyncio.run(updates()) == ["/pause_generation", "i000001-v000006", "/continue_generation"]


def test_nothing_is_asked_of_unknown_weights() -> None:
    async def generate() -> None:
        async with client_and_server() as (client, _):
            with pytest.raises(EngineFault, match="no such file"):
                await client.update_weights(Path("broken"), Version(1, 5))
            with pytest.raises(EngineFault, match="weights are unknown"):
                await client.generate(request(fake.GOOD))
            await client.update_weights(Path("weights"), Version(1, 5))
            with pytest.raises(EngineFault, match="found tokens of"):
                await client.generate(request(fake.GOOD))

    asyncio.run(generate())


@pytest.mark.parametrize(("directory", "what"), [("broken", "no such file"), ("stale", "reports version")])
def test_an_update_that_did_not_happen_is_a_fault(directory: str, what: str) -> None:
    async def update() -> None:
        async with client_and_server() as (client, _):
            await client.update_weights(Path(directory), Version(1, 5))

    with pytest.raises(EngineFault, match=what) as caught:
        asyncio.run(update())
    assert caught.value.reason == "update_failed"


def test_large_weights_have_longer_for_their_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    call = SglangClient._call

    async def noted(self: SglangClient, path: str, body: dict | None, timeout_s: float) -> object:
        limits.extend([timeout_s] if path == "/update_weights_from_disk" else [])
        return await call(self, path, body, timeout_s)

    monkeypatch.setattr(SglangClient, "_call", noted)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(140 * 10**9)

    async def update() -> None:
        async with client_and_server() as (client, _):
            await client.update_weights(tmp_path, Version(1, 5))

    asyncio.run(update())
    assert limits == [60.0 + 1400.0]


def test_a_server_that_is_not_there_is_a_connection_fault() -> None:
    async def generate() -> None:
        client = SglangClient("http://127.0.0.1:9", TOKEN, make_config("sglang").rollout.engine, SERVED)
        try:
            await client.generate(request(fake.GOOD))
        finally:
            await client.close()

    with pytest.raises(EngineFault) as caught:
        asyncio.run(generate())
    assert caught.value.reason == "connection"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with what `start` takes for a model."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


@pytest.fixture
def faked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch the fake server instead of SGLang's."""
    monkeypatch.setattr(sglang_engine, "_SERVER", "tests.engine_fake_server")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1]))


def make_engine(place: Path, **settings: object) -> SglangEngine:
    config = make_config("sglang", **settings)
    return SglangEngine(config, 2, place / "model", Version(1, 0), place / "logs", 2)


def start(engine: SglangEngine) -> None:
    async def start_and_close() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    asyncio.run(start_and_close())


def test_a_dead_server_is_told_from_a_broken_connection_and_leaves_no_children(place: Path, faked: None) -> None:
    async def die() -> tuple[EngineFault, str, int]:
        engine = make_engine(place)
        await engine.start()
        leader = engine._session.leader.pid
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


def test_who_waits_for_a_dying_server_can_be_cancelled_at_that_moment(place: Path, faked: None) -> None:
    """As the role does with its other tasks once one of them has seen the end."""

    async def die() -> tuple[bool, bool]:
        engine = make_engine(place)
        await engine.start()
        asked = asyncio.create_task(engine.generate(request(fake.HANG)))
        engine._session.leader.kill()
        await engine.wait_dead()
        in_time = asked.cancel()
        await asyncio.wait([asked], timeout=10)
        await engine.close()
        return in_time, asked.cancelled()

    in_time, cancelled = asyncio.run(die())
    assert cancelled or not in_time


def test_the_server_is_nobodys_rank_and_does_not_see_its_key(
    place: Path, faked: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "PMI_RANK", "PMIX_ID", "OMPI_COMM_WORLD")
    for name in ranks:
        monkeypatch.setenv(name, "1")

    async def environment() -> tuple[str, dict[str, str]]:
        engine = make_engine(place)
        await engine.start()
        try:
            return engine._key_file.read_text(), await engine._client._call("/environment", None, 5.0)
        finally:
            await engine.close()

    key, found = asyncio.run(environment())
    assert not found.keys() & set(ranks)
    assert found["OMP_NUM_THREADS"] == "1"
    assert len(key) == 64 and key not in str(found)
    assert found["PATH"] == os.environ["PATH"]


def test_a_server_dies_with_the_role_that_started_it() -> None:
    tie = "import os, sys; from relax_hpc.rendezvous.process import die_with_parent; die_with_parent()"
    server = f"{tie}; print(os.getpid(), flush=True); sys.stdin.read()"
    role = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {server!r}])"
    root = Path(__file__).parents[1]
    process = subprocess.Popen([sys.executable, "-c", role], cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        child = psutil.Process(int(process.stdout.readline()))
        process.kill()
        child.wait(timeout=5)


def test_a_part_that_dies_is_the_end_of_the_server(place: Path, faked: None) -> None:
    """At once, and for those that wait for an answer; what comes and goes beside the parts is nobody's end."""

    async def scene() -> tuple[str, str]:
        engine = make_engine(place)
        await engine.start()
        parts = {process.cmdline()[0]: process for process in session_of(engine._session.leader.pid)}
        helper = os.pidfd_open(parts["helper"].pid)
        parts["helper"].kill()
        assert select.select([helper], [], [], 5.0)[0]
        os.close(helper)
        await engine.generate(request(fake.GOOD))
        asked = asyncio.create_task(engine.generate(request(fake.HANG)))
        parts["sglang::part"].kill()
        async with asyncio.timeout(5.0):
            said = await engine.wait_dead()
            with pytest.raises(EngineFault) as caught:
                await asked
        await engine.close()
        assert caught.value.reason == "dead" and not session_of(engine._session.leader.pid)
        return said, str(caught.value)

    said, fault = asyncio.run(scene())
    assert "sglang::part" in said and said in fault


def test_processes_that_a_security_module_hides_are_no_members(monkeypatch: pytest.MonkeyPatch) -> None:
    """SELinux may say nothing of other people's sessions."""
    getsid = os.getsid

    def hiding(pid: int) -> int:
        if pid == os.getppid():
            raise PermissionError(1, "Operation not permitted")
        return getsid(pid)

    monkeypatch.setattr(os, "getsid", hiding)
    session = object.__new__(Session)
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


def test_nobody_can_take_the_port_of_a_server_that_starts(place: Path, faked: None) -> None:
    """As any user could who sets SO_REUSEADDR, while it was bound and did not listen; then he was sent the key.

    The real attack needs another user: root makes one up, others try it as themselves, which is easier for them.
    """
    os.mkfifo(place / "model" / "hold")
    who = {"user": 65534, "group": 65534, "extra_groups": []} if os.getuid() == 0 else {}

    async def scene() -> subprocess.CompletedProcess:
        engine = make_engine(place)
        starting = asyncio.create_task(engine.start())
        writer = await asyncio.to_thread(os.open, place / "model" / "hold", os.O_WRONLY)
        words = ["/usr/bin/python3", "-c", SQUATTER, str(engine._arguments["port"])]
        tried = await asyncio.to_thread(subprocess.run, words, **who, capture_output=True, text=True, timeout=30)
        assert not starting.done()
        os.close(writer)
        await starting
        await engine.generate(request(fake.GOOD))
        await engine.close()
        return tried

    tried = asyncio.run(scene())
    assert tried.returncode == 1 and tried.stderr == "refused\n"


def test_nothing_is_asked_of_a_dead_servers_port(place: Path, faked: None) -> None:
    """Anybody may listen there then, and answer."""

    async def scene() -> str:
        engine = make_engine(place)
        await engine.start()
        engine._session.leader.kill()
        await engine.wait_dead()
        accepted: list[object] = []
        address = ("127.0.0.1", engine._arguments["port"])
        async with await asyncio.start_server(lambda *both: accepted.append(both), *address):
            with pytest.raises(EngineFault) as caught:
                await engine.generate(request(fake.GOOD))
        await engine.close()
        assert not accepted
        return str(caught.value)

    assert "dead: the server ended with code -9" in asyncio.run(scene())


def test_scratch_of_a_killed_process_goes_with_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the site's folder has too long a name for sockets in it."""
    monkeypatch.setenv(LOCAL_DIR, str(tmp_path / ("disk" * 16)))
    outside = tmp_path / "in-memory"
    outside.touch()
    script = "import os, sys; from pathlib import Path; from relax_hpc.local_dir import Scratch; one = Scratch()\n"
    script += "print(one.path, flush=True); one.outside(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    killed = subprocess.run([sys.executable, "-c", script, outside], capture_output=True, text=True, timeout=60)
    left = Path(killed.stdout.strip())
    assert left.exists() and outside.exists() and len(str(left / "tmpabcdefgh")) < 107
    with Scratch() as scratch:
        assert not left.exists() and not outside.exists()
        with Scratch() as other:
            assert scratch.path.exists() and other.path != scratch.path
    assert not scratch.path.exists() and not other.path.exists()


def test_scratch_of_another_boot_goes_and_of_others_who_may_live_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LOCAL_DIR, str(tmp_path))
    monkeypatch.setattr(local_dir, "_SHORT", 1000)
    host, boot, pids = local_dir._here()
    outside = tmp_path / "in-memory"
    outside.touch()

    def left(*marks: str) -> Path:
        path = tmp_path / f"scratch-{''.join(marks)}-{dead.pid}-x"
        path.mkdir()
        (path / ".outside").write_text(f"{outside}\n")
        return path

    with subprocess.Popen(["true"]) as dead:
        pass
    booted = left(host, "0000" if boot != "0000" else "0001", pids)
    others = [left("0000" if host != "0000" else "0001", boot, pids), left(host, boot, "fffff")]
    with Scratch() as scratch:
        assert sorted(tmp_path.iterdir()) == sorted([*others, outside, scratch.path])
    assert not booted.exists() and outside.exists(), "its name may be another's in this boot"
    here = left(host, boot, pids)
    local_dir.sweep(tmp_path)
    assert not here.exists() and not outside.exists()


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
        session = Session(leader)
        assert leader.stdin and leader.stdout
        async with asyncio.timeout(20):
            await leader.stdout.readexactly(6)
            leader.stdin.write(b"x")
            assert await session.ended == "the server ended with code 3"
        _, alive = psutil.wait_procs(session.members(), timeout=10)
        assert not alive
        return session.shared_memory()

    try:
        assert asyncio.run(scene()) == {path}
    finally:
        path.unlink(missing_ok=True)


def test_a_busy_port_is_the_users_to_change(place: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"rollout\.engine\.port: {port} is in use"):
            start(make_engine(place, port=port - 2))


def test_a_missing_model_is_named(place: Path) -> None:
    (place / "model" / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"model\.path: .*model has no config\.json"):
        start(make_engine(place))


def test_flags_that_are_the_engines_are_refused(place: Path) -> None:
    with pytest.raises(ConfigError, match=r"flags\.port: not allowed; set rollout\.engine\.port"):
        make_engine(place, flags={"port": 30000})
    with pytest.raises(ConfigError, match=r"flags\.grpc_port: not allowed; it cannot be changed"):
        make_engine(place, flags={"grpc_port": 30001})


def test_flags_override_what_the_device_sets(place: Path) -> None:
    assert make_engine(place)._arguments["disable_radix_cache"]
    flags = {"max_total_tokens": 99, "disable_radix_cache": False}
    arguments = make_engine(place, flags=flags, port=4000)._arguments
    assert (arguments["max_total_tokens"], arguments["disable_radix_cache"], arguments["port"]) == (99, False, 4002)


def test_each_replica_has_gpus_of_its_own(place: Path) -> None:
    config = make_config("sglang", flags={"tp_size": 2})
    config.model.device = "cuda"
    assert server_arguments(config, 2, place, Version(1, 0))["base_gpu_id"] == 4
    arguments = server_arguments(config, 2, place, Version(1, 0), place=0)
    assert arguments["base_gpu_id"] == 0 and arguments["random_seed"] == config.seed + 2, "first of another node"
    config.rollout.engine.flags["base_gpu_id"] = 1
    assert server_arguments(config, 2, place, Version(1, 0))["base_gpu_id"] == 1


@pytest.mark.parametrize(
    ("flags", "private"), [({}, True), ({"dp_size": 1, "nnodes": 1}, True), ({"dp_size": 2}, False)]
)
def test_ranks_of_one_server_meet_in_memory_also_where_its_flags_say_that_they_are_one_group(
    flags: dict, private: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang's own store listens on every interface."""
    for name in (override := "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")
    sglang_server._stay_private(flags)
    assert os.environ[override].startswith("file:///proc/") == private


@pytest.mark.skipif(
    not effort(0, 1), reason="test_bad_input.py has a whole run end by it; alone: env/test.sh --all, or RELAX_WHOLE=1"
)
def test_an_unknown_flag_is_refused_with_the_nearest(place: Path) -> None:
    """By SGLang's own list, in the server process."""
    with pytest.raises(ConfigError) as caught:
        start(make_engine(place, flags={"max_total_token": 99}))
    expected = "SGLang has no such server argument; the nearest is max_total_tokens"
    assert str(caught.value) == f"rollout.engine.flags.max_total_token: {expected}"


def test_a_server_that_cannot_start_is_dead_and_its_log_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_engine, "_SERVER", "tests.no_such_module")
    with pytest.raises(EngineFault, match=r"ended with code 1 while starting; see .*engine-2\.log") as caught:
        start(make_engine(place))
    assert caught.value.reason == "dead"
    assert "no_such_module" in (place / "logs" / "engine-2.log").read_text()


def test_a_server_that_never_gets_healthy_is_dead_and_gone(place: Path, faked: None) -> None:
    engine = make_engine(place, start_timeout_s=0.01)
    with pytest.raises(EngineFault, match=r"start_timeout_s = 0\.01") as caught:
        start(engine)
    assert caught.value.reason == "dead"
    assert not session_of(engine._session.leader.pid)
