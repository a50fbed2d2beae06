"""Starts of a real SGLang server that fail: its own error is quoted, and /dev/shm is left as it was.

Whole starts take half a minute of CPU time each. test_sglang_faults.py has the same with a made-up
server, and tests/cluster/test_supervisor.py the end of a run by the same error twice.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.effort import effort
from tests.requirements import requires

requires("sglang", "torch")

from relax_hpc.base.errors import find_start_error  # noqa: E402
from relax_hpc.base.orphaned_memory import sweep_orphaned_memory  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.rollout.engines.engine import EngineFault  # noqa: E402
from relax_hpc.rollout.engines.sglang.engine import SglangEngine  # noqa: E402
from tests.helpers.engine_helpers import make_config, make_model, session_of  # noqa: E402

pytestmark = [
    pytest.mark.run,
    pytest.mark.skipif(
        not effort(0, 1),
        reason="test_sglang_faults.py has a made-up server; whole starts: env/test.sh --all, or "
        "RELAX_WHOLE=1",
    ),
]
START_S = 600.0
LOADED = """
import inspect
import psutil
from psutil import virtual_memory

def loaded():
    # Another process takes 60 % of the memory while the server loads its weights.
    memory = virtual_memory()
    names = [frame.function for frame in inspect.stack()]
    share = 0.4 if "_profile_available_bytes" in names else 1.0
    return memory._replace(available=int(memory.available * share))

psutil.virtual_memory = loaded
"""


def memory_of_servers() -> set[str]:
    """Files in /dev/shm, without the folders of runs that other tests may have."""
    return {path.name for path in Path("/dev/shm").iterdir() if not path.name.startswith("relax-")}


@pytest.fixture
def engine_folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", 0)
    return tmp_path


def make_engine(folder: Path, **flags: object) -> SglangEngine:
    config = make_config("sglang", flags=flags, start_timeout_s=START_S)
    return SglangEngine(config, 0, folder / "model", Version(1, 0), folder / "logs", 0)


def start(engine: SglangEngine) -> None:
    async def start_and_close() -> None:
        try:
            await engine.start()
        finally:
            await engine.close()

    asyncio.run(start_and_close())


@pytest.fixture
def loaded_machine(engine_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server find most of the memory taken when it has loaded its weights."""
    (engine_folder / "sitecustomize.py").write_text(LOADED)
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{engine_folder}{os.pathsep}{root}")


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"mem_fraction_static": 0.4}, "ValueError: Loaded weights leave no GPU memory for the KV"),
        ({"attention_backend": "flashinfer"}, "flashinfer"),
        ({"attention_backend": "fa9"}, "ValueError: Invalid attention backend: fa9"),
    ],
    ids=["memory", "kernel", "flag"],
)
def test_the_error_of_a_start_is_quoted_and_counts_as_one_that_recurs(
    engine_folder: Path, loaded_machine: None, flags: dict[str, object], error: str
) -> None:
    before = memory_of_servers()
    engine = make_engine(engine_folder, **flags)
    with pytest.raises(EngineFault, match="while starting: ") as caught:
        start(engine)
    assert error in find_start_error(caught.value)
    assert find_start_error(caught.value) in str(caught.value)
    assert not session_of(engine.server.session.leader.pid)
    assert memory_of_servers() <= before


def test_the_default_share_of_memory_starts_beside_other_load(
    engine_folder: Path, loaded_machine: None
) -> None:
    """A share of 0.4 fails on the same machine, see the test above."""
    start(make_engine(engine_folder))


def test_a_server_that_is_killed_while_it_starts_leaves_no_memory(engine_folder: Path) -> None:
    before = memory_of_servers()
    engine = make_engine(engine_folder)

    async def kill_once_it_has_memory() -> set[str]:
        starting = asyncio.create_task(engine.start())
        async with asyncio.timeout(START_S):
            while not (created := memory_of_servers() - before):
                await asyncio.sleep(0.02)
        engine.server.session.leader.kill()
        with pytest.raises(EngineFault, match="ended with code -9 while starting"):
            await starting
        return created

    assert asyncio.run(kill_once_it_has_memory())
    assert memory_of_servers() <= before


ROLE = """
import asyncio, sys
from pathlib import Path
from tests.rollout.test_sglang_starts import make_engine

async def serve():
    await make_engine(Path(sys.argv[1])).start()

asyncio.run(serve())
"""


def test_a_role_that_is_killed_while_its_server_starts_leaves_memory_to_the_next(
    engine_folder: Path,
) -> None:
    """The server ends with the role. The supervisor, or the next server of the node, removes its
    memory."""
    before = memory_of_servers()
    command = [sys.executable, "-c", ROLE, str(engine_folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(command, env=environment) as role:
        deadline = time.monotonic() + START_S
        while memory_of_servers() <= before:
            assert time.monotonic() < deadline and role.poll() is None
            time.sleep(0.02)
        role.kill()
    deadline = time.monotonic() + 60.0
    while memory_of_servers() - before and time.monotonic() < deadline:
        sweep_orphaned_memory()
        time.sleep(0.1)
    assert memory_of_servers() <= before
