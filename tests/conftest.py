"""Settings of every test session: offline, no GPU, one thread a process, and no process may outlive
the session."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest
from hypothesis import settings

from tests.budgets import Budgets
from tests.effort import effort
from tests.guardian import MARK, RUNS, Session, new_mark, register, session_processes
from tests.helpers.slurm_sandbox import sandbox, small_sandbox  # noqa: F401
from tests.requirements import DEVICE

# Until all is imported, as ranks do (relax_hpc.base.imports): two fifths of the time that
# collecting takes.
gc.disable()
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# Here, before any test imports torch: tests are for the CPU, on a workstation with a GPU too.
if DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # Triton looks at it when it is imported, which megatron-core does where it is installed.
    os.environ["TRITON_INTERPRET"] = "1"
else:
    # Sums in one order, which tests that compare bits need; see training_helpers.one_rank_fixture.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

settings.register_profile("default", deadline=None)
# The same examples each time, of which the first find what many of them find: the others are in
# `env/test.sh --all`.
settings.register_profile("ci", deadline=None, derandomize=True, max_examples=effort(30, 100))
settings.load_profile(
    "ci" if os.environ.get("CI") or os.environ.get("RELAX_REQUIRE") else "default"
)

SESSION = pytest.StashKey[Session]()
"""Of the controller alone: workers are parts of its session."""
GRACE_S = 5.0
"""How long processes that were told to end have, after the last test, to be gone."""
LEAKS = pytest.StashKey[list[str]]()
BENCH = Path(__file__).parents[1] / "tools" / "bench"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory, mode 0700 as runs demand."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a module of tools/bench, which is no package, as its scripts do."""
    monkeypatch.syspath_prepend(str(BENCH))
    yield importlib.import_module
    for name in [
        name
        for name, one in sys.modules.items()
        if str(getattr(one, "__file__", "")).startswith(str(BENCH))
    ]:
        del sys.modules[name]


def pytest_addoption(parser: pytest.Parser) -> None:
    """See tests/budgets.py."""
    parser.addoption(
        "--record-budgets",
        action="store_true",
        help="write what each test file takes to tests/budgets.json",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Mark this session's environment before the first test starts a process."""
    if hasattr(config, "workerinput"):
        # A worker that is killed leaves its processes to the controller.
        os.environ[MARK] = new_mark(os.environ[MARK])
    else:
        config.stash[SESSION] = Session()
    config.stash[LEAKS] = []
    config.pluginmanager.register(Budgets(config), "budgets")


def pytest_sessionstart(session: pytest.Session) -> None:
    """Name the folder of this process's `tmp_path` for the guardian. pytest has no public name for
    its factory."""
    register(RUNS, str(session.config._tmp_path_factory.getbasetemp()))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is not marked otherwise is quick; with workers, it comes last, and fills what whole runs
    leave over.

    On a GPU only what is marked `gpu` is run: a process that has computed on the CPU hides it from
    megatron-core.
    """
    if DEVICE != "cpu":
        config.hook.pytest_deselected(
            items=[item for item in items if not item.get_closest_marker("gpu")]
        )
        items[:] = [item for item in items if item.get_closest_marker("gpu")]
    for item in items:
        if " at 0x" in item.nodeid:
            raise pytest.UsageError(
                f"{item.nodeid}: an address in a test's name, which each worker calls another"
            )
        if {"sandbox", "small_sandbox"}.intersection(item.fixturenames):
            item.add_marker(pytest.mark.slurm)
        if item.get_closest_marker("run") is None and item.get_closest_marker("slurm") is None:
            item.add_marker(pytest.mark.unit)
    if hasattr(config, "workerinput"):
        quick = dict.fromkeys((item.path for item in items), True)
        for item in items:
            quick[item.path] &= item.get_closest_marker("unit") is not None
        budgets = config.pluginmanager.get_plugin("budgets")
        items.sort(key=lambda item: (quick[item.path], -budgets.expected(item.path), item.path))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: object, error: object) -> None:
    """A worker tells what it found left behind."""
    node.config.stash[LEAKS] += getattr(node, "workeroutput", {}).get("leaks", [])


def pytest_collection_finish() -> None:
    """What was imported is no garbage; what tests make may be."""
    gc.freeze()
    gc.enable()


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except (psutil.Error, OSError):
        return {}


def _alive(process: psutil.Process) -> bool:
    """Running, and not Python's own helper that ends with its parent."""
    try:
        return (
            process.status() != psutil.STATUS_ZOMBIE
            and "multiprocessing.resource_tracker" not in str(process.cmdline())
        )
    except psutil.Error:
        return False


def left_processes(config: pytest.Config) -> list[psutil.Process]:
    """Living processes that this session's tests started, orphans included."""
    own = psutil.Process().children(recursive=True)
    processes = {process.pid: process for process in (*own, *session_processes(os.environ[MARK]))}
    if SESSION in config.stash:
        processes.pop(config.stash[SESSION].guardian.pid, None)
    return [process for _, process in sorted(processes.items()) if _alive(process)]


def _describe(process: psutil.Process) -> str:
    try:
        command = " ".join(process.cmdline())[:200] or process.name()
    except psutil.Error:
        command = "?"
    return (
        f"pid {process.pid}, started by "
        f"{_environment(process).get('PYTEST_CURRENT_TEST', '?')}: {command}"
    )


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Name and end every process that a test left behind, and fail the session for it."""
    psutil.wait_procs(left_processes(session.config), timeout=GRACE_S)
    for process in left_processes(session.config):
        session.config.stash[LEAKS].append(_describe(process))
        process.kill()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["leaks"] = session.config.stash[LEAKS]
    if session.config.stash[LEAKS]:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove what the session leaves on the machine."""
    if SESSION in config.stash:
        config.stash[SESSION].end()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the processes that were left, where a reader of a failed session looks."""
    if config.stash[LEAKS]:
        terminalreporter.section("processes left behind by tests", red=True)
        for line in config.stash[LEAKS]:
            terminalreporter.line(line)
