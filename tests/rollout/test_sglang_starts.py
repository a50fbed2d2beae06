"""Starts of a real SGLang server that fail: its own error is quoted, and /dev/shm is left as it was.

Whole starts take half a minute of CPU time each. test_sglang_faults.py has the same with a made-up
server, and tests/cluster/test_supervisor.py the end of a run by the same error twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.effort import effort
from tests.requirements import requires

requires("sglang", "torch")

import psutil  # noqa: E402

from relax_hpc.base.errors import find_start_error  # noqa: E402
from relax_hpc.base.orphaned_memory import (  # noqa: E402
    MEMORY,
    _used_files,
    sweep_orphaned_memory,
)
from relax_hpc.base.processes import all_processes  # noqa: E402
from relax_hpc.base.versions import Version  # noqa: E402
from relax_hpc.rollout.engines.engine import EngineFault  # noqa: E402
from relax_hpc.rollout.engines.sglang.engine import SglangEngine  # noqa: E402
from tests.helpers.engine_helpers import make_config, make_model, session_of, start_and_close  # noqa: E402

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


SERVER_FILES = ("sglang_", "sgl_", "psm_", "nccl-", "sem.")
"""Prefixes of the files that SGLang and its libraries create in /dev/shm."""


def orphaned_files() -> set[Path]:
    """Files of servers in /dev/shm that no process uses. Other servers may run on this machine."""
    files = {path for path in MEMORY.iterdir() if path.name.startswith(SERVER_FILES)}
    for process in all_processes() if files else ():
        files -= _used_files(process.pid)
    return files


def files_of(process: psutil.Process) -> set[Path]:
    """Files of servers in /dev/shm that a process and its children use."""
    files = set[Path]()
    with contextlib.suppress(psutil.NoSuchProcess):
        for member in (process, *process.children(recursive=True)):
            files |= {path for path in _used_files(member.pid) if path.parent == MEMORY}
    return {path for path in files if path.name.startswith(SERVER_FILES)}


@pytest.fixture
def engine_folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model", 0)
    return tmp_path


def make_engine(folder: Path, **flags: object) -> SglangEngine:
    config = make_config("sglang", flags=flags, start_timeout_s=START_S)
    return SglangEngine(config, 0, folder / "model", Version(1, 0), folder / "logs", 0)


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
    before = orphaned_files()
    engine = make_engine(engine_folder, **flags)
    with pytest.raises(EngineFault, match="while starting: ") as caught:
        start_and_close(engine)
    assert error in find_start_error(caught.value)
    assert find_start_error(caught.value) in str(caught.value)
    assert not session_of(engine.server.session.leader.pid)
    assert orphaned_files() <= before


def test_the_default_share_of_memory_starts_beside_other_load(
    engine_folder: Path, loaded_machine: None
) -> None:
    """A share of 0.4 fails on the same machine, see the test above."""
    start_and_close(make_engine(engine_folder))


def test_a_server_that_is_killed_while_it_starts_leaves_no_memory(engine_folder: Path) -> None:
    engine = make_engine(engine_folder)

    async def kill_once_it_has_memory() -> set[Path]:
        starting = asyncio.create_task(engine.start())
        async with asyncio.timeout(START_S):
            while not hasattr(engine.server, "session"):
                await asyncio.sleep(0.02)
            leader = engine.server.session.leader
            while not (created := files_of(psutil.Process(leader.pid))):
                await asyncio.sleep(0.02)
        leader.kill()
        with pytest.raises(EngineFault, match="ended with code -9 while starting"):
            await starting
        return created

    created = asyncio.run(kill_once_it_has_memory())
    assert created and not [path for path in created if path.exists()]


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
    command = [sys.executable, "-c", ROLE, str(engine_folder)]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    created = set[Path]()
    with subprocess.Popen(command, env=environment) as role:
        deadline = time.monotonic() + START_S
        while not created:
            assert time.monotonic() < deadline and role.poll() is None
            created = files_of(psutil.Process(role.pid))
            time.sleep(0.02)
        role.kill()
    deadline = time.monotonic() + 60.0
    while orphaned_files().isdisjoint(created) and any(path.exists() for path in created):
        assert time.monotonic() < deadline, "the server lives without its role"
        time.sleep(0.02)
    sweep_orphaned_memory()
    assert not [path for path in created if path.exists()]
