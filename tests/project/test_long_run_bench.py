"""The arithmetic of the benchmark of long runs: what grows is found, and what scatters is not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

BENCH = Path(__file__).parents[2] / "tools" / "bench"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TRENDS, USAGE = load("long_run_trends"), load("long_run_usage")


def series(chance: np.random.Generator, slope: float) -> tuple[np.ndarray, np.ndarray]:
    """Values of which neighbours are alike, as memory is."""
    steps = np.arange(1000.0)
    noise = np.convolve(chance.normal(size=1100), np.ones(30) / 30, "same")[:1000]
    return steps, 50 + slope * steps + noise


def test_the_interval_of_a_flat_series_has_zero() -> None:
    chance = np.random.default_rng(0)
    trends = [TRENDS.fit_trend(*series(chance, 0.0)) for _ in range(100)]
    covered = sum(trend.low <= 0 <= trend.high for trend in trends)
    assert covered >= 85


def test_growth_is_found() -> None:
    chance = np.random.default_rng(1)
    trends = [TRENDS.fit_trend(*series(chance, 0.01)) for _ in range(50)]
    assert all(trend.low > 0 for trend in trends)
    assert sum(trend.low <= 0.01 <= trend.high for trend in trends) >= 42


@pytest.mark.parametrize("count", [1, 2])
def test_few_samples_say_nothing(count: int) -> None:
    trend = TRENDS.fit_trend(np.arange(float(count)), np.ones(count))
    assert trend.low == -trend.high == -np.inf


def test_a_fall_is_measured_from_the_best_before_it() -> None:
    fall, spread = TRENDS.largest_fall([0.1, 0.9, 0.85, 0.95, 0.6], 100)
    assert fall == pytest.approx(0.35) and 0.05 < spread < 0.07
    assert TRENDS.largest_fall([0.0, 1.0, 0.99], 100) == pytest.approx((0.01, 0.0281), abs=1e-3)


@pytest.fixture
def child(tmp_path: Path) -> Iterator[psutil.Process]:
    """A process with a child, a mapped file of /dev/shm, and an open pipe to it."""
    program = """
import mmap, os, subprocess, sys
file = os.memfd_create("x")
path = f"/dev/shm/long-run-test-{os.getpid()}"
with open(path, "w+b") as shm:
    shm.truncate(1 << 16)
    mapped = mmap.mmap(shm.fileno(), 0)
os.unlink(path)
subprocess.Popen([sys.executable, "-c", "input()", "--role", "actor"])
print("ready", flush=True)
input()
"""
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout and process.stdin
        assert process.stdout.readline() == b"ready\n"
        yield psutil.Process(process.pid)
        process.stdin.close()
        process.kill()


def test_the_processes_of_a_run_are_sampled(child: psutil.Process, tmp_path: Path) -> None:
    (tmp_path / "queue" / "journal").mkdir(parents=True)
    (tmp_path / "queue" / "journal" / "a").write_bytes(b"x" * 100)
    lines = [{"step": 6, "perf/step_s": 1.0}, {"step": 7, "perf/step_s": 1.0}, {"step": 9}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "metrics.jsonl").write_text(text + '{"step": 8, "perf/')
    output = tmp_path / "usage"
    USAGE.PERIOD_S = 0.05
    USAGE.record(tmp_path, child, output, limit_s=0.2)
    first, *_ = [json.loads(line) for line in output.read_text().splitlines()]
    assert first["step"] == 7
    assert first["disk"]["queue/journal"] == 100
    parent = first["processes"]["supervisor"]
    assert parent["shm_bytes"] == 1 << 16 and parent["threads"] == 1
    assert parent["descriptors"] >= 3 and parent["memory_bytes"] > os.sysconf("SC_PAGE_SIZE")
    assert "actor" in first["processes"]
