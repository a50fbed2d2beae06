"""The arithmetic of the benchmarks: which steps count, how a step is divided, and how programs take
turns."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import itertools
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from aiohttp import web
from aiohttp.test_utils import TestServer

from relax_hpc.base.metrics.read_spans import Process, Span
from relax_hpc.config import load
from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt
from relax_hpc.ops.checks.settings import check
from tests.helpers.model_files import model_directory
from tests.helpers.turns_helpers import DeterministicEngine, backend, player, wrap_tokenizer

pytestmark = pytest.mark.run
BENCH = Path(__file__).parents[2] / "tools" / "bench"


def step_spans(first: float) -> list[Span]:
    """A step of one second: generation, a gap, two forward roles at once, training, and its
    publication."""
    names = [
        ("rollout", "generate", 0.0, 0.5),
        ("rollout", "queue", 0.5, 0.53),
        ("reference", "forward", 0.55, 0.65),
    ]
    names += [
        ("actor_fwd", "forward", 0.6, 0.7),
        ("advantages", "queue", 0.54, 0.56),
        ("actor", "wait", 0.0, 0.7),
    ]
    names += [
        ("actor", "train", 0.7, 0.8),
        ("actor", "train", 0.81, 0.98),
        ("actor", "publish", 0.98, 1.0),
    ]
    return [
        Span(role, what, int(first), first + start, first + end) for role, what, start, end in names
    ]


def test_parts_of_a_step_add_up_to_it(bench):
    quickstart = bench("quickstart")
    parts = quickstart.parts_of(step_spans(0.0), 0.0, 1.0)
    assert sum(parts.values()) == pytest.approx(1.0)
    assert parts["generation"] == pytest.approx(0.5)
    assert parts["forward roles"] == pytest.approx(0.15)
    assert parts["train"] == pytest.approx(0.27)
    # From 0.55 on the second queue span lies under a forward pass: 30 ms and 10 ms are left.
    assert parts["queue, rewards and rows"] == pytest.approx(0.04)
    assert parts[quickstart.WAITING] == pytest.approx(0.02)


def test_own_share_is_what_no_model_covers(bench):
    assert bench("quickstart").own_share(step_spans(0.0), 0.0, 1.0) == pytest.approx(
        1 - 0.5 - 0.15 - 0.27
    )


def test_a_step_lasts_from_the_end_of_training_to_the_next(bench):
    spans = step_spans(0.0) + step_spans(1.0) + step_spans(3.0)
    assert bench("quickstart").step_intervals(spans) == {1: (0.98, 1.98)}


def test_ratio_is_stated_with_and_without_forward_passes(bench):
    lines = [
        {"forward": odd, "start": 0.0, "end": 0.5 + 0.25 * odd, "seconds": {"train": 0.125}}
        for odd in (False, True)
    ]
    figures = bench("quickstart").plain_figures(lines, 0.75)
    expected = [(0.5, None), (1.5, False), (0.75, None), (1.0, True), (0.125, None)]
    assert [(figure.value, figure.ok) for figure in figures] == expected


def test_steps_are_found_in_progress_lines(bench):
    quickstart = bench("quickstart")
    assert quickstart.step_of_run("eta  4m07s  step   7/300  reward 0.449") == 7
    assert quickstart.step_of_run("[   6.7s] actor: started incarnation 1 (actor)") is None
    assert quickstart.step_of_plain('{"step": 3, "forward": false}') == 3
    assert quickstart.step_of_plain("without forward passes: median step 0.458 s") is None


STEPS = (
    "import itertools, time\nfor i in itertools.count():\n print(i, flush=True)\n time.sleep(0.02)"
)


def test_programs_take_turns(bench):
    with bench("turns").Program([sys.executable, "-c", STEPS], int, {}) as program:
        program.turn(until=2, timeout_s=30)
        program.turn(until=5, timeout_s=30)
        assert program.last_step >= 5 and not program.ended and program.peak_bytes > 0
        (start, stop), (again, _) = program.windows
        assert program.had_machine(start, stop) and not program.had_machine(start, again)
    assert program.returncode(0) == -9


def test_a_program_that_makes_no_step_is_given_up(bench):
    with bench("turns").Program(
        [sys.executable, "-c", "import time; time.sleep(60)"], int, {}
    ) as program:
        with pytest.raises(TimeoutError, match="step 0 did not end"):
            program.turn(until=0, timeout_s=0.1)


@pytest.mark.parametrize("staleness", [0, 2])
def test_what_overlap_simulates_is_a_good_configuration(bench, staleness, tmp_path):
    overlap = bench("overlap")
    case = overlap.Case(ratio=0.5, sigma=1.0, staleness=staleness, streaming=staleness > 0)
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(case.settings(0.9, steps=20)))
    config = load([file])
    assert check(config) == []
    simulated, work = (
        config.rollout.engine.simulated,
        config.prompts_per_step * config.samples_per_prompt,
    )
    mean_s = simulated.response_s * math.exp(0.5)
    assert mean_s * work / simulated.concurrency == pytest.approx(
        0.3
    ) and config.actor.simulated_step_s == pytest.approx(0.6)


def test_the_ideal_of_a_step_is_the_longer_side_or_both(bench):
    overlap = bench("overlap")
    for staleness, streaming, ideal in [(0, False, 0.7), (0, True, 0.4), (1, True, 0.4)]:
        case = overlap.Case(1.0, 0.0, staleness, streaming)
        found = overlap.Result(case, generate_s=0.3, train_s=0.4, possible_s=0.5, step_s=0.8)
        assert found.ideal_s == pytest.approx(ideal) and found.efficiency == pytest.approx(
            ideal / 0.8
        )


@pytest.mark.parametrize(
    ("staleness", "streaming", "step_s"), [(0, False, 5.0), (0, True, 3.5), (1, True, 3.0)]
)
def test_a_schedule_in_which_nothing_else_takes_time(bench, staleness, streaming, step_s):
    """Two seconds of generation by two places, three of training; with four windows a quarter of it
    comes after."""
    overlap, config = bench("overlap"), Config(max_staleness=staleness, samples_per_prompt=2)
    config.rollout.engine.simulated.concurrency, config.rollout.groups_per_request = 2, 1
    config.actor.simulated_step_s = 3.0
    found = overlap.schedule([[0.5] * 8] * 6, config, streaming)
    steps = [later - earlier for earlier, later in pairwise(found)]
    assert found[0] == pytest.approx(0.5 + 3.0 if streaming else 5.0)
    assert steps == pytest.approx([step_s] * 5)


@pytest.mark.parametrize(("mode", "ideal"), [("colocate", 0.7), ("0", 0.7), ("1", 0.5), ("4", 0.5)])
def test_the_ideal_step_of_a_mode_follows_from_what_its_sides_take(bench, mode, ideal):
    line = bench("modes").measured(mode, {"rollout_s": 0.5, "actor_s": 0.2, "step_s": 1.0})
    assert (line["ideal_s"], line["ideal_share"]) == pytest.approx((ideal, ideal))


def test_a_start_lasts_until_the_first_work(bench):
    startup, spans = (
        bench("startup"),
        [Span("actor", "start", None, 100.0, 102.5), Span("actor", "train", 0, 102.5, 103)],
    )
    process, watch = (
        Process("actor", 2, "actor", "0", 100.0, spans=spans),
        startup.Watch(os.getpid()),
    )
    watch._spent["actor", 2] = [(101.0, 0.9), (102.4, 2.2), (102.6, 2.3), (103.0, 2.6)]
    wall, cpu = startup.starts("actor: in place", watch, [process], target=True)
    assert (wall.value, wall.ok, cpu.value) == (2.5, True, 2.3)
    # What had ended before it was looked at again.
    assert watch.spent(("actor", 2), 200.0) == 2.6


def test_what_two_versions_measure_under_one_name_is_compared(bench):
    both = bench("before_after")
    figure = {"name": "pull", "value": 2.0, "unit": "GB/s", "target": None, "rounds": []}
    line = {"what": "get", "unit": "GB/s", "ours": 1.0, "targets": {}, "rounds": [1.0, 3.0]}
    case = {"ratio": 1.0, "sigma": 0.0, "staleness": 1}
    cpu = {
        "name": "128x2, load 2.0: CPU of actor",
        "value": 30.0,
        "unit": "ms/step",
        "target": None,
        "rounds": [],
    }
    record = {
        "fault": "kill:actor",
        "detect": 0.5,
        "working": None,
        "caught_up": 4.0,
        "lost": 0,
        "duplicated": 0,
    }
    before = both.found_in({"figures": [figure, figure | {"name": "gone"}, cpu]}) | both.found_in(
        {"lines": [line]}
    )
    before |= both.found_in([{"case": case, "efficiency": 0.5}]) | both.found_in(
        {"records": [record]}
    )
    later = cpu | {"name": "128x2, load 7.1: CPU of actor", "value": 20.0}
    now = both.found_in({"figures": [figure | {"value": 3.0}, figure | {"name": "new"}, later]})
    now |= both.found_in({"lines": [line | {"rounds": [2.0, 4.0]}]}) | both.found_in(
        {"records": [record | {"detect": 0.5}, record | {"detect": 1.5}]}
    )
    now |= both.found_in([{"case": case, "efficiency": 1.0}])
    assert list(both.cells(before, now)) == [
        ["pull", "2 GB/s", "3 GB/s", "1.50"],
        ["128x2: CPU of actor", "30 ms/step", "20 ms/step", "1.50"],
        ["get", "2 GB/s (1 to 3)", "3 GB/s (2 to 4)", "1.50"],
        ["kill:actor: detect", "0.5 s", "1 s (0.5 to 1.5)", "0.50"],
        ["kill:actor: caught_up", "4 s", "4 s (4 to 4)", "1.00"],
        ["kill:actor: lost", "0 samples", "0 samples (0 to 0)", "same"],
        ["kill:actor: duplicated", "0 samples", "0 samples (0 to 0)", "same"],
        ["G/T 1, sigma 0, staleness 1: ideal / step", "0.5", "1", "2.00"],
    ]


def test_each_part_of_agentic_takes_what_it_is_told(bench):
    for part, options in bench("agentic").PARTS.items():
        assert {*options} <= {*inspect.signature(bench(f"agentic_{part}").measure).parameters}


def test_episodes_against_slow_environments_are_a_good_configuration(bench, tmp_path):
    idle = bench("agentic_idle")
    file = tmp_path / "run.yaml"
    model = model_directory(
        tmp_path / "model", max_position_embeddings=bench("agentic_parts").CONTEXT
    )
    file.write_text(yaml.safe_dump(idle.settings(24, model)))
    assert check(load([file])) == []


def test_an_engine_is_idle_where_places_are_free(bench):
    noted = [(0.0, 1), (2.0, 1), (4.0, 3), (7.0, 0), (10.0, 0)]
    assert bench("agentic_idle").shares(noted, places=2) == pytest.approx((0.7, 1.0, 5.0))


def test_the_bare_client_asks_for_what_the_episodes_had(bench):
    rate, parts, tokenizer = (
        bench("agentic_rate"),
        bench("agentic_parts"),
        wrap_tokenizer(backend()),
    )
    drawing, asked = DeterministicEngine(tokenizer), list[dict[str, Any]]()

    class Engine:
        async def generate(self, request):
            return replace(await drawing(request), cached=10)

    async def generate(request):
        body = await request.json()
        asked.append(body)
        drawn = body["sampling_params"]["max_new_tokens"]
        return web.json_response({"output_ids": [7] * drawn, "meta_info": {"cached_tokens": 5}})

    async def compared():
        prompt = Prompt("p", (5, 6), "?", "")
        episodes = player(parts.Instant, tokenizer, max_turns=parts.TURNS)
        ours = await rate.play_episodes(Engine(), episodes, [prompt] * 2, concurrency=2)
        application = web.Application()
        application.router.add_post("/generate", generate)
        async with TestServer(application) as server:
            served = SimpleNamespace(server=SimpleNamespace(url=str(server.make_url("/")), key="k"))
            return ours, await rate.replay_episodes(served, ours.episodes, concurrency=1)

    ours, bare = asyncio.run(compared())
    (first, *_), _ = ours.episodes
    assert (
        first.added == (5, 6)
        and len(ours.episodes[0]) == parts.TURNS
        and bare.episodes == ours.episodes
    )
    ends = [
        itertools.accumulate(len(turn.added) + turn.tokens for turn in turns)
        for turns in ours.episodes
    ]
    drawn = sorted(
        len(body["input_ids"]) + body["sampling_params"]["max_new_tokens"] for body in asked
    )
    assert drawn == sorted(itertools.chain.from_iterable(ends))
    assert bare.cached == 5 * 8 / sum(len(body["input_ids"]) for body in asked) == ours.cached / 2


def test_what_a_request_at_the_endpoint_takes_is_counted_in_all_its_processes(bench, tmp_path):
    endpoint = bench("agentic_endpoint")
    before = endpoint.cpu_s(os.getpid())
    shape = endpoint.ChatShape(turns=2, message_tokens=20, response_tokens=10)
    costs_s = asyncio.run(endpoint.request_costs(tmp_path, shape, chats=1))
    assert len(costs_s) == 2 and min(costs_s) > 0
    assert endpoint.cpu_s(os.getpid()) > before


def runner() -> Any:
    spec = importlib.util.spec_from_file_location("bench_runner", BENCH / "__main__.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_runner_lists_every_benchmark_with_what_it_measures():
    done = subprocess.run([sys.executable, BENCH], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for name, program in runner().benchmarks().items():
        assert re.search(rf"^{name}\b.* \w+", done.stdout, re.MULTILINE), name
        assert len(runner().summary(program)) > 30, f"{program}: say what it measures"


def test_the_runner_refuses_an_unknown_benchmark():
    words = [sys.executable, BENCH, "plane"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert done.returncode == 78 and "found 'plane', allowed:" in done.stderr


def test_a_result_is_stored_with_commit_and_command(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH.parent / "docs"))
    results = tmp_path / "tools" / "docs" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(importlib.import_module("benchmarks"), "RESULTS", results)
    module = runner()
    monkeypatch.setattr(module, "FOLDER", tmp_path / "tools" / "bench")
    options = ["--size", "4KiB", "--plane", "shm", "--rounds", "1"]
    assert module.run_and_store("planes", BENCH / "planes.py", options, "copies") == 0
    result = json.loads((results / "copies.json").read_text())
    assert result["command"] == "python tools/bench planes --size 4KiB --plane shm --rounds 1"
    assert result["rows"][0][0] == "memcpy, 4096 bytes: speed / memcpy" and result["commit"]
