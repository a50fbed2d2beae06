"""Time of one scrape of /metrics, over HTTP, of a run with many engines.

The service answers from memory, so that no hub and no engine is needed: the run has the values that
a hub with these engines reports, and one value of each declared metric.

    python tools/bench/scrape.py --engines 100 --json
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from aiohttp import web
from figures import Figure, print_figures

from relax_hpc.base.metrics.tags import TAGS
from relax_hpc.base.rundir import RunDir
from relax_hpc.config.schema import Config
from relax_hpc.queue.client import QueueStatus
from relax_hpc.service import metrics_routes
from relax_hpc.service.live_run import LiveRun

TARGET_MS = 20.0
PERCENTILE = 99


def main() -> None:
    options = parse()
    settings = {"engines": options.engines, "scrapes": options.scrapes}
    print_figures(figures(options), settings, options.json)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=100)
    parser.add_argument("--scrapes", type=int, default=500)
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def figures(options: argparse.Namespace) -> Iterator[Figure]:
    cpu_before = time.process_time()
    seconds, size = asyncio.run(measure(options.engines, options.scrapes))
    cpu_ms = 1e3 * (time.process_time() - cpu_before) / options.scrapes
    times_ms = sorted(1e3 * value for value in seconds)
    slowest_ms = times_ms[PERCENTILE * len(times_ms) // 100]
    target = f"<= {TARGET_MS:g}"
    median_ms = statistics.median(times_ms)
    yield Figure("a scrape, median", median_ms, "ms", target, median_ms <= TARGET_MS)
    yield Figure(f"a scrape, p{PERCENTILE}", slowest_ms, "ms")
    yield Figure("CPU of a scrape, its client included", cpu_ms, "ms")
    yield Figure("size of the answer", size / 1024, "KiB")


async def measure(engines: int, scrapes: int) -> tuple[list[float], int]:
    """Seconds of each scrape, and bytes of the last answer."""
    with tempfile.TemporaryDirectory() as folder:
        client: Any = None
        live = LiveRun(RunDir(Path(folder)), Config(), client)
        live.status = status_of(engines)
        live.metrics.values.update(dict.fromkeys(TAGS, 0.5))
        app = web.Application()
        app.add_routes(metrics_routes.routes(live))
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        port = runner.addresses[0][1]
        url = f"http://127.0.0.1:{port}/metrics"
        try:
            return await asyncio.to_thread(scrape, url, scrapes)
        finally:
            await runner.cleanup()


def scrape(url: str, scrapes: int) -> tuple[list[float], int]:
    """Scrape from another thread, with a new connection each time. The first one is not counted."""
    seconds, body = [], b""
    for _ in range(scrapes + 1):
        begin = time.perf_counter()
        with urllib.request.urlopen(url, timeout=30) as answer:
            body = answer.read()
        seconds.append(time.perf_counter() - begin)
    return seconds[1:], len(body)


def status_of(engines: int) -> QueueStatus:
    """Status of a hub with so many engines, each in a group of its own."""
    groups = ["rollout", *(f"rollout-{number}" for number in range(2, engines + 1))]
    return QueueStatus(
        trained_steps=7,
        steps=100,
        accepted=1000,
        newest="i000001-v000007",
        readers={f"{group}/0": "i000001-v000006" for group in groups},
        depth={"generating": 3, "ready": 2, "reissued": 0},
        oldest_s={"generating": 4.5, "ready": 0.0},
        untrained_bytes=1 << 20,
        dropped={"stale": 1},
        noted={"engine_fault/timeout": 2},
        disk=[],
        segments={},
        refused_connections=0,
        checkpoints=[],
        incarnations=dict.fromkeys(groups, 1),
        beats={
            f"{group}/rollout": {"group": group, "incarnation": 1, "age_s": 0.5} for group in groups
        },
        lacking={},
        finished=False,
        waiting=(),
    )


if __name__ == "__main__":
    main()
