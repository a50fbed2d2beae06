"""Whole runs for tests: start a run as a user does, watch it, kill a role, and read its results.

Nothing here sleeps for a fixed time. Every wait ends with its condition, with the run, or at a
deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import yaml

from relax_hpc.base.metrics.read import load_metrics, read_metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.cluster.supervise.command import AHEAD
from relax_hpc.cluster.supervise.launch_records import read_launch
from relax_hpc.config import load_resolved
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.inspect.journal_copy import journal_records
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import record_file

if TYPE_CHECKING:
    from torch import Tensor

QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
ALL = bool(os.environ.get("RELAX_REAL_ENGINES"))
"""Real engines everywhere, and every fault in each layout: env/test.sh --all."""
POLL_S = 0.02
STOP_S = 20.0

SMALL: dict[str, Any] = {
    "seed": 3,
    "steps": 3,
    "prompts_per_step": 4,
    "samples_per_prompt": 4,
    "model": {
        "tiny": {"hidden_size": 32, "num_layers": 1, "head_dim": 16, "intermediate_size": 64}
    },
    "data": {
        "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "digits": 3,
        "max_prompt_tokens": 32,
    },
    "rollout": {"max_new_tokens": 5, "groups_per_request": 2, "engine": {"kind": "transformers"}},
    "actor": {"optimizer": {"lr": 1e-3}},
    "queue": {"keep_steps": 1000, "wait_timeout_s": 120.0},
    "eval": {"every": 0},
    # Its process costs a second of CPU in every run. Tests of the service turn it on.
    "service": {"enabled": False},
    # After a minute, a run would start a second process for each role, which imports libraries.
    "liveness": {"stop_timeout_s": 5.0, "start_ahead_s": 0.0},
    "groups": {"actor_fwd": {}},
}
"""Overrides of a run that takes seconds and is reproducible bit for bit. The queue keeps all shards."""


LIGHT: dict[str, Any] = {
    "rollout": {"engine": {"kind": "simulated", "simulated": {"response_s": 0.1}}},
    "actor": {"forward": ["actor_fwd"]},
    "groups": {"actor_fwd": None, "reference": None},
}
"""Overrides of SMALL for tests that prove nothing about models. One process imports torch, instead of
three or four."""


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `over`, merged by section. Both arguments stay unchanged."""
    both = {
        k: merged(base[k], v)
        for k, v in over.items()
        if isinstance(v, dict) and isinstance(base.get(k), dict)
    }
    return base | over | both


def engine_of(kind: str) -> str:
    """`kind`, or "sglang" if all tests must use real engines."""
    return "sglang" if ALL else kind


def with_engine(engine: str) -> dict[str, Any]:
    """The small `transformers` engine of SMALL, no engine at all, or SGLang as in the quickstart
    with a model that its attention can serve."""
    if engine == "transformers":
        return {}
    if engine == "simulated":
        # Long enough that processes that start meanwhile find free cores.
        return {"rollout": {"engine": {"kind": "simulated", "simulated": {"response_s": 0.3}}}}
    quickstart = yaml.safe_load(QUICKSTART.read_text())
    return {
        "model": {"tiny": quickstart["model"]["tiny"]},
        "rollout": {"engine": quickstart["rollout"]["engine"]},
    }


def write_config(
    path: Path, overrides: dict[str, Any] | None = None, base: dict[str, Any] | None = None
) -> Path:
    """Write `base` (default: SMALL) with `overrides` to `path`, and return `path`."""
    path.write_text(yaml.safe_dump(merged(SMALL if base is None else base, overrides or {})))
    return path


@dataclass(slots=True)
class Running:
    """A run that `relax-hpc run` supervises. `running` creates it. `run` is its directory, and
    `output` the file with its output."""

    process: subprocess.Popen
    run: RunDir
    output: Path

    def wait(self, seconds: float) -> int:
        """The supervisor's exit code. AssertionError with the end of all logs if it runs longer."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s\n{self.story()}") from None

    def finish(self, seconds: float) -> None:
        """Wait for the end and for success."""
        code = self.wait(seconds)
        assert code == 0, f"exit code {code}\n{self.story()}"

    def wait_until(self, condition: Callable[[], Any], goal: str, seconds: float) -> Any:
        """The first true value of `condition`. AssertionError if the run ends before, or at the
        deadline."""
        for _ in range(int(seconds / POLL_S)):
            value = condition()
            if value:
                return value
            try:
                self.process.wait(POLL_S)
                break
            except subprocess.TimeoutExpired:
                continue
        value = condition()
        if value:
            return value
        raise AssertionError(
            f"{goal}: not within {seconds} s, exit code {self.process.poll()}\n{self.story()}"
        )

    def wait_for_step(self, step: int, seconds: float) -> None:
        """Wait until training step `step` (from 0) has its line in metrics.jsonl."""

        def trained() -> bool:
            return any(
                row["step"] >= step and "reward/mean" in row for row in read_metrics(self.run.root)
            )

        self.wait_until(trained, f"step {step} trained", seconds)

    def processes(self, role: str) -> list[psutil.Process]:
        """The living processes of `role` ("controller" too), the supervisor's descendants, by
        ascending pid.

        Processes that were started ahead and still wait are left out.
        """
        try:
            children = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        active = [
            child for child in children if _role(child) == role and not waits(self.run, child)
        ]
        return sorted(active, key=lambda process: process.pid)

    def kill(self, role: str) -> int:
        """Kill the first process of `role`, wait until it has ended, and return its pid."""
        process = self.wait_until(lambda: self.processes(role), f"{role} runs", 10.0)[0]
        process.kill()
        self.wait_until(lambda: not _alive(process), f"{role} is gone", 10.0)
        return process.pid

    def incarnations(self, group: str) -> int:
        """Incarnations of `group` so far."""
        return len(list(self.run.rendezvous(group).glob("inc-*.launch.json")))

    def story(self) -> str:
        """The ends of the logs of the supervisor and the roles, for the message of a failure."""
        logs = [self.output, *sorted((self.run.root / "logs").rglob("*.log"))]
        texts = {
            path: path.read_text(errors="replace").strip()[-2000:] for path in logs if path.exists()
        }
        return "\n".join(f"--- {path}\n{text}" for path, text in texts.items() if text)


def waits(run: RunDir, process: psutil.Process) -> bool:
    """Whether a role's process was started ahead and its incarnation has not begun."""
    try:
        arguments = process.cmdline()
    except psutil.Error:
        return False
    group, number = (arguments[arguments.index(name) + 1] for name in ("--group", "--incarnation"))
    return AHEAD in arguments and read_launch(run, group, int(number)) is None


def _role(process: psutil.Process) -> str:
    """The role that a process runs. Empty for launchers, engines and ended processes."""
    try:
        arguments = process.cmdline()
        parent = process.parent()
        if parent and parent.cmdline() == arguments:
            # A fork that lives only while it writes a file.
            return ""
    except psutil.Error:
        return ""
    return (
        arguments[arguments.index("--role") + 1]
        if arguments[1:3] == ["-m", "relax_hpc.roles"]
        else ""
    )


def _alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextmanager
def running(
    directory: Path,
    overrides: dict[str, Any] | None = None,
    base: dict[str, Any] | None = None,
    *options: str,
) -> Iterator[Running]:
    """Start a run in `directory`/run with `write_config`'s configuration, and end it after the
    block.

    `options`: further words of the command line. "--resume" resumes a run that exists already.
    """
    config = write_config(directory / "config.yaml", overrides, base)
    root, output = directory / "run", directory / "output.txt"
    command = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(config),
        "--run_dir",
        str(root),
        *options,
    ]
    with output.open("ab") as file:
        # The most permissive umask that a site may set.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            env=os.environ.copy(),
            umask=0,
        )
    try:
        yield Running(process, RunDir(root), output)
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Stop a supervisor immediately by two signals. If it does not end, kill it with its roles."""
    for number in (signal.SIGTERM, signal.SIGTERM):
        if process.poll() is None:
            process.send_signal(number)
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)


def open_to_others(folder: Path) -> list[Path]:
    """Files and folders in ``folder``, and itself, that other users than the owner may read or
    write."""
    paths = [folder, *folder.rglob("*")]
    return [path for path in paths if not path.is_symlink() and path.stat().st_mode & 0o077]


# -- results of a run ------------------------------------------------------------------------------


def queue_state(run: RunDir) -> QueueState:
    """State of the queue after all records of the journal."""
    state = QueueState(Plan.from_config(load_resolved(run.root)))
    for record in journal_records(run):
        state.apply(record)
    return state


def queue_rows(run: RunDir) -> dict[str, Row]:
    """Every row that the queue holds at the end, with all its fields, by its id.

    Rows whose shards were deleted after a checkpoint are missing. queue.keep_steps keeps them.
    """
    state = queue_state(run)
    shards = {
        number: record_file.read(run.shards / s.descriptor["name"])
        for number, s in state.shards.by_number.items()
    }
    rows: dict[str, Row] = {}
    for ticket, group in sorted(state.groups.items()):
        for number, fields in group.parts:
            for name, row in shards[number].items():
                if int(name.partition(".")[0]) == ticket:
                    rows.setdefault(name, {"row_id": name}).update(
                        {field: row[field] for field in fields}
                    )
    return rows


def trained_steps(run: RunDir) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl that belong to training steps of the surviving lineage, by step."""
    return [row for row in read_metrics(run.root) if "reward/mean" in row]


def rollbacks(run: RunDir) -> list[tuple[int, int]]:
    """(incarnation, step) of each return to an earlier step."""
    return load_metrics(run.root).rollbacks


def final_weights(run: RunDir) -> dict[str, Tensor]:
    """The newest published version by Hugging Face name."""
    from safetensors.torch import load_file

    names = [path.name for path in run.weights.iterdir() if not path.name.startswith(".")]
    folder = run.weights / str(max(map(Version.parse, names))) / "model"
    tensors = dict[str, Any]()
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors
