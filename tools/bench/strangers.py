"""What strangers who reach the controller's port, and do not hold the run's token, cost a living
run.

Starts a run, and beside it, for a while at a time, two processes of strangers at nice 19: one with
many connections that say nothing, one whose senders send empty frames. Both connect again when they
are turned away. Steps among them are compared with those of the quiet time just before, round by
round in the same run, as what else the machine does is in both; the result is the median of the
rounds' ratios.

    python tools/bench/strangers.py --rounds 9 --json
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil
from figures import Figure, print_figures

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.open_files import connection_limit
from relax_hpc.net.rendezvous.roster import latest_card

ROOT = Path(__file__).parents[2]
IDLE, SENDERS, BYTES_PER_S = 1100, 40, 2e6
CHUNK = bytes(1 << 16)
"""Frames of length 0."""
AGAIN_S = 1.0
"""Within which who was turned away is there again."""
START_S, STEP_S = 600.0, 120.0
"""How long a start, and one step, may take."""
WARM_UP_STEPS = 5
LIMIT = 1.2


# -- strangers -------------------------------------------------------------------------------------


def connected(endpoint: str) -> socket.socket | None:
    """A connection, if somebody listens there."""
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    with contextlib.suppress(OSError):
        made = socket.create_connection((host, int(port)), 5.0)
        made.setblocking(False)
        return made
    return None


def is_over(one: socket.socket | None) -> bool:
    """Whether the other end has ended it."""
    try:
        return one is None or not one.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True


def stay(endpoint: str, count: int) -> None:
    """Hold ``count`` connections that say nothing, and make those anew that were ended."""
    held: list[socket.socket | None] = [None] * count
    while True:
        began = time.monotonic()
        for number, one in enumerate(held):
            if is_over(one):
                if one:
                    one.close()
                held[number] = connected(endpoint)
        time.sleep(max(0.0, began + AGAIN_S - time.monotonic()))


def send(endpoint: str, count: int, bytes_per_s: float) -> None:
    """From ``count`` connections in turn, so many bytes in all; who was turned away connects again
    for its turn."""
    held: list[socket.socket | None] = [connected(endpoint) for _ in range(count)]
    due, pause = time.monotonic(), len(CHUNK) / bytes_per_s
    while True:
        for number, one in enumerate(held):
            if is_over(one):
                if one:
                    one.close()
                one = held[number] = connected(endpoint)
            with contextlib.suppress(OSError):
                if one:
                    one.send(CHUNK)
            due += pause
            time.sleep(max(0.0, due - time.monotonic()))


@contextmanager
def strangers(endpoint: str) -> Iterator[None]:
    """They are there, each kind in a process of its own, until the block ends."""
    with ExitStack() as stack:
        for kind in ("stay", "send"):
            process = subprocess.Popen([sys.executable, __file__, f"--{kind}", endpoint])
            stack.callback(process.wait)
            stack.callback(process.kill)
        yield


# -- the run ---------------------------------------------------------------------------------------


@contextmanager
def running(
    folder: Path, engine: str, overrides: Sequence[str]
) -> Iterator[tuple[subprocess.Popen, RunDir]]:
    """A quickstart that goes on until the block ends; what it prints is in ``folder``."""
    config, root = ROOT / "configs" / "runs" / "quickstart.yaml", folder / "run"
    words = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(config),
        "--run_dir",
        str(root),
    ]
    words += ["--steps", "100000", "--rollout.engine.kind", engine, *overrides]
    with (
        (folder / "output.txt").open("wb") as output,
        subprocess.Popen(words, stdout=output, stderr=output) as process,
    ):
        try:
            yield process, RunDir(root)
        finally:
            for _ in range(2):
                process.terminate()
            process.wait(60.0)


def wait_for_steps(process: subprocess.Popen, run: RunDir, count: int, seconds: float) -> None:
    """Until so many are trained. RuntimeError if the run ends, or that takes longer."""
    end = time.monotonic() + seconds
    while len(times_of(run)) < count:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError(
                f"{run.root}: step {count} was not trained; see {run.root.parent / 'output.txt'}"
            )
        time.sleep(0.1)


def times_of(run: RunDir) -> list[float]:
    """When each step ended."""
    return [row["time"] for row in read_metrics(run.root) if "reward/mean" in row]


def seconds_within(times: Sequence[float], start: float, end: float) -> list[float]:
    """Of the steps that began and ended in that time."""
    return [
        later - earlier for earlier, later in pairwise(times) if start <= earlier and later <= end
    ]


def measured(process: subprocess.Popen, run: RunDir, steps: int) -> list[float]:
    """Seconds of the next ``steps`` whole steps."""
    start = time.time()
    wait_for_steps(process, run, len(times_of(run)) + steps + 1, STEP_S * (steps + 1))
    return seconds_within(times_of(run), start, time.time())


def controller_of(process: subprocess.Popen) -> psutil.Process:
    """The hub's process that listens."""
    family = psutil.Process(process.pid).children(recursive=True)
    return next(one for one in family if "controller" in one.cmdline())


def used_by(process: psutil.Process) -> tuple[float, float]:
    """Seconds of a core so far, and now."""
    found = process.cpu_times()
    return found.user + found.system, time.monotonic()


def figures(options: argparse.Namespace, folder: Path) -> Iterator[Figure]:
    """Each round's two medians as they are measured, then the ratio of all."""
    with running(folder, options.engine, options.overrides) as (process, run):
        wait_for_steps(process, run, WARM_UP_STEPS, START_S)
        card = latest_card(run, "hub")
        assert card
        hub, ratios = controller_of(process), []
        shares: dict[str, list[float]] = {"quiet": [], "among strangers": []}
        for number in range(1, options.rounds + 1):
            steps = {}
            for when in shares:
                with strangers(card.endpoint) if when != "quiet" else nullcontext():
                    # Until they have started, and are there.
                    measured(process, run, 1)
                    began = used_by(hub)
                    steps[when] = measured(process, run, options.steps)
                    ended, files = used_by(hub), hub.num_fds()
                shares[when].append((ended[0] - began[0]) / (ended[1] - began[1]))
                yield Figure(
                    f"round {number}: step, {when}", median(steps[when]), "s", rounds=steps[when]
                )
            ratios.append(median(steps["among strangers"]) / median(steps["quiet"]))
        for when, found in shares.items():
            yield Figure(f"controller's share of a core, {when}", median(found), "", rounds=found)
        yield Figure("files open in the controller among strangers", files, "")
        ratio = median(ratios)
        yield Figure(
            "step among strangers / quiet", ratio, "times", f"<= {LIMIT}", ratio <= LIMIT, ratios
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="of each part of a round")
    parser.add_argument(
        "--engine", default="sglang", choices=["sglang", "transformers", "simulated"]
    )
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stay", default="", metavar="ENDPOINT", help=argparse.SUPPRESS)
    parser.add_argument("--send", default="", metavar="ENDPOINT", help=argparse.SUPPRESS)
    options, options.overrides = parser.parse_known_args()
    if endpoint := options.stay or options.send:
        os.nice(19)
        connection_limit()
        stay(endpoint, IDLE) if options.stay else send(endpoint, SENDERS, BYTES_PER_S)
    with tempfile.TemporaryDirectory() as folder:
        settings = {
            "engine": options.engine,
            "idle": IDLE,
            "senders": SENDERS,
            "MB_per_s": BYTES_PER_S / 1e6,
        }
        print_figures(figures(options, Path(folder)), settings, options.json)


if __name__ == "__main__":
    main()
