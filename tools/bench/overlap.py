"""How close generation and training come to going on at the same time, by max_staleness.

Every row is a run of real processes: controller with its journal on disk, rollout, actor with its
publisher. Only what the engine and the trainer compute is replaced by waiting, so that the ideal is
known: a step cannot take less than max(G, T), G being the seconds of all responses of a step over
the engine's concurrency, and T those of training; at staleness 0, without streaming, not less than
G + T. A long response that its step has to wait for can make that impossible: `possible` is a step
of these very responses if nothing but generating and training took any time.

    python tools/bench/overlap.py --ratios 0.5 1 2 --staleness 0 1 2 4 --sigmas 0 1 --json
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import load_resolved
from relax_hpc.config.schema import Config
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.rollout.engines.engine import Sampling
from relax_hpc.rollout.engines.simulated_engine import SimulatedEngine
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.rollout.rows import requests_for
from relax_hpc.tasks.files import open_train

sys.path.insert(0, str(Path(__file__).parent))
from figures import Figure, print_result
from overlap_bound import Bound

WARM_UP_STEPS = 8
"""First steps that are left out: the pipeline fills. As many last ones are as are ahead when all
tickets are out."""
CONCURRENCY = 64
GROUPS_PER_REQUEST = 2
REQUESTS = 20
"""In flight: as many as keep the engine's places full while some wait for their longest response.
What waits in the engine's own line is promised to an earlier step than it comes to be made for."""
_WINDOWS = 4
_LONGEST = 7
"""Tokens of a prompt and its response: all have as many."""
_RUN_S = 600.0
CASE_NAME = "G/T {ratio:g}, sigma {sigma:g}, staleness {staleness}: ideal / step"


@dataclass(frozen=True, slots=True)
class Case:
    """What is simulated."""

    ratio: float
    """G / T."""
    sigma: float
    """Of the lognormal distribution of response times; 0: all alike."""
    staleness: int
    streaming: bool

    def settings(self, step_s: float, steps: int) -> dict[str, Any]:
        """Of a run in which G + T is `step_s`, in the mean over responses."""
        groups, samples, tokens = 32, 8, 1
        generate_s = step_s * self.ratio / (1 + self.ratio)
        mean = math.exp(self.sigma**2 / 2)
        simulated = {
            "response_s": generate_s * CONCURRENCY / (groups * samples) / mean,
            "sigma": self.sigma,
            "concurrency": CONCURRENCY,
        }
        # A part of a step is trained on as soon as it is there, or all of it at once.
        window = groups * samples * _LONGEST // (_WINDOWS if self.streaming else 1)
        return {
            "steps": steps,
            "prompts_per_step": groups,
            "samples_per_prompt": samples,
            "max_staleness": self.staleness,
            "model": {
                "tiny": {
                    "hidden_size": 32,
                    "num_layers": 1,
                    "head_dim": 16,
                    "intermediate_size": 64,
                }
            },
            "data": {
                "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
                "digits": 4,
                "max_prompt_tokens": 32,
            },
            "rollout": {
                "groups_per_request": GROUPS_PER_REQUEST,
                "requests_in_flight": min(
                    REQUESTS, groups // GROUPS_PER_REQUEST * (self.staleness + 1)
                ),
                "max_new_tokens": tokens,
                "engine": {"kind": "simulated", "simulated": simulated},
            },
            "actor": {
                "simulated_step_s": step_s - generate_s,
                "max_tokens_per_micro_batch": window,
                "balance_window": 1,
            },
            "checkpoint": {"every": 1_000_000},
            "weights": {"file_every": 0},
            "eval": {"every": 0},
            "groups": {"actor_fwd": None, "reference": None},
        }


@dataclass(frozen=True, slots=True)
class Result:
    """Seconds of a step: what is simulated, and what was measured."""

    case: Case
    generate_s: float
    train_s: float
    possible_s: float
    """If everything else took no time."""
    step_s: float

    @property
    def ideal_s(self) -> float:
        """The least that a step can take."""
        both = (self.generate_s, self.train_s)
        return sum(both) if self.case.staleness == 0 and not self.case.streaming else max(both)

    @property
    def efficiency(self) -> float:
        """The least over what was measured."""
        return self.ideal_s / self.step_s


def measure(case: Case, step_s: float, steps: int, folder: Path) -> Result:
    """Run `case`; means over the steps after the first ones."""
    folder.mkdir(parents=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(case.settings(step_s, steps)))
    words = [
        sys.executable,
        "-m",
        "relax_hpc",
        "run",
        "--config",
        str(file),
        "--run_dir",
        str(folder / "run"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_RUN_S)
    if done.returncode:
        raise RuntimeError(f"{case}: exit code {done.returncode}: {done.stderr[-500:]}")
    run = RunDir(folder / "run")
    ends = {row["step"]: row["time"] for row in read_metrics(run.root) if "reward/mean" in row}
    config = load_resolved(run.root)
    seconds = responses_s(run, config)
    possible = schedule(seconds, config, case.streaming)
    first, last = WARM_UP_STEPS, steps - 1 - (case.staleness + 1 if case.staleness else 0)
    works = [sum(found) / config.rollout.engine.simulated.concurrency for found in seconds]
    return Result(
        case,
        sum(works[first + 1 : last + 1]) / (last - first),
        config.actor.simulated_step_s,
        (possible[last] - possible[first]) / (last - first),
        (ends[last] - ends[first]) / (last - first),
    )


def responses_s(run: RunDir, config: Config) -> list[list[float]]:
    """By step, how long each response takes, in the order of tickets."""
    engine = SimulatedEngine(config, 0, run.model, Version(1, 0))
    asyncio.run(engine.start())
    shape = config.rollout
    tokenizer = load_tokenizer(run.model)
    source = PromptSource(open_train(run, config, tokenizer), config)
    sampling = Sampling(shape.temperature, shape.top_p, tuple(tokenizer.eos_ids), config.seed)

    def seconds(ticket: int) -> Iterator[float]:
        prompt, budget = source.prompt(ticket, 0), shape.max_new_tokens
        for request in requests_for(prompt, ticket, config.samples_per_prompt, sampling, budget):
            yield engine.seconds(request) * len(engine.tokens(request)) / budget

    size = config.prompts_per_step
    steps = (range(step * size, (step + 1) * size) for step in range(config.steps))
    return [[found for ticket in tickets for found in seconds(ticket)] for tickets in steps]


def schedule(responses: Sequence[Sequence[float]], config: Config, streaming: bool) -> list[float]:
    """When each step would be trained if all but generating and training took no time, the queue's
    rules kept."""
    return Bound(responses, config, _WINDOWS if streaming else 1).trained()


HEAD = (
    "   G/T  sigma  staleness  streaming    G, s    T, s  ideal, s  possible, s  step, s  "
    "ideal/step  possible/step"
)


def line_of(found: Result) -> str:
    case = found.case
    return (
        f"{case.ratio:6.2f} {case.sigma:6.1f} {case.staleness:10d} "
        f"{'yes' if case.streaming else 'no':>10s} "
        f"{found.generate_s:7.3f} {found.train_s:7.3f} {found.ideal_s:9.3f} "
        f"{found.possible_s:12.3f} "
        f"{found.step_s:8.3f} {found.efficiency:11.3f} {found.possible_s / found.step_s:14.3f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.5, 1.0, 2.0], help="G / T")
    parser.add_argument(
        "--staleness", type=int, nargs="+", default=[0, 1, 2, 4], help="max_staleness"
    )
    parser.add_argument(
        "--sigmas", type=float, nargs="+", default=[0.0, 1.0], help="of the times of responses"
    )
    parser.add_argument("--step_s", type=float, default=1.0, help="G + T, seconds")
    parser.add_argument(
        "--steps", type=int, default=40, help=f"of each run; the first {WARM_UP_STEPS} are left out"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    cases = [
        Case(ratio, sigma, staleness, streaming=staleness > 0)
        for sigma in args.sigmas
        for staleness in args.staleness
        for ratio in args.ratios
    ]
    print(f"{HEAD}  load", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            load_before = os.getloadavg()[0]
            found = measure(case, args.step_s, args.steps, Path(folder) / str(number))
            print(f"{line_of(found)}  {load_before:4.1f}", flush=True)
            results.append(
                asdict(found) | {"efficiency": found.efficiency, "load_before": load_before}
            )
    if args.json:
        figures = [
            Figure(CASE_NAME.format(**result["case"]), result["efficiency"], "")
            for result in results
        ]
        settings = {"steps": args.steps, "load_before": results[0]["load_before"]}
        print_result(figures, settings, results=results)


if __name__ == "__main__":
    main()
