"""How well generation and training overlap, by max_staleness.

Every row is a run of real processes: controller with its journal on disk, rollout, actor with its
publisher. Only the computations of engine and trainer are replaced by waits, so the ideal is known.
A step takes at least max(G, T) seconds, where G is the time of all responses of a step divided by
the engine's concurrency, and T the time of training. At staleness 0 without streaming, it takes at
least G + T. Long responses can make this impossible: `possible` is the time of a step with the same
responses if only generation and training took time.

    python tools/bench/overlap.py --ratios 0.5 1 2 --staleness 0 1 2 4 --sigmas 0 1 --json
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
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
"""First steps that are not measured, because the pipeline fills. The last steps, in which no ticket
is left to start, are not measured either."""
CONCURRENCY = 64
GROUPS_PER_REQUEST = 2
REQUESTS = 20
"""Requests in flight. They keep the engine busy while some of them wait for their longest response.
More requests would wait in the engine, and the weights would be newer than their tickets need."""
_WINDOWS = 4
_LONGEST = 7
"""Tokens of a prompt and its response, the same for all."""
_RUN_S = 600.0
CASE_NAME = "G/T {ratio:g}, sigma {sigma:g}, staleness {staleness}: ideal / step"


@dataclass(frozen=True, slots=True)
class Case:
    """Settings of a simulated run."""

    ratio: float
    """G / T."""
    sigma: float
    """Sigma of the lognormal distribution of response times. 0: all times are equal."""
    staleness: int
    streaming: bool

    def settings(self, step_s: float, steps: int) -> dict[str, Any]:
        """Settings of a run in which the mean of G + T is `step_s` seconds."""
        groups, samples, tokens = 32, 8, 1
        generate_s = step_s * self.ratio / (1 + self.ratio)
        mean = math.exp(self.sigma**2 / 2)
        simulated = {
            "response_s": generate_s * CONCURRENCY / (groups * samples) / mean,
            "sigma": self.sigma,
            "concurrency": CONCURRENCY,
        }
        # With streaming, a window of the step is trained as soon as it is complete.
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
    """Simulated and measured seconds of a step."""

    case: Case
    generate_s: float
    train_s: float
    possible_s: float
    """Seconds if only generation and training took time."""
    step_s: float

    @property
    def ideal_s(self) -> float:
        """Smallest possible seconds of a step."""
        if self.case.staleness == 0 and not self.case.streaming:
            return self.generate_s + self.train_s
        return max(self.generate_s, self.train_s)

    @property
    def efficiency(self) -> float:
        """Smallest possible seconds, relative to those measured."""
        return self.ideal_s / self.step_s


def measure(case: Case, step_s: float, steps: int, folder: Path) -> Result:
    """Run `case`. The results are means over the steps after the warm-up."""
    folder.mkdir(parents=True)
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(case.settings(step_s, steps)))
    command = [sys.executable, "-m", "relax_hpc", "run", "--config", str(file)]
    command += ["--run_dir", str(folder / "run")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=_RUN_S)
    if process.returncode:
        raise RuntimeError(f"{case}: exit code {process.returncode}: {process.stderr[-500:]}")
    run = RunDir(folder / "run")
    ends = {row["step"]: row["time"] for row in read_metrics(run.root) if "reward/mean" in row}
    config = load_resolved(run.root)
    seconds = responses_s(run, config)
    possible = schedule(seconds, config, case.streaming)
    first, last = WARM_UP_STEPS, steps - 1 - (case.staleness + 1 if case.staleness else 0)
    concurrency = config.rollout.engine.simulated.concurrency
    generate_s = [sum(responses) / concurrency for responses in seconds]
    return Result(
        case,
        sum(generate_s[first + 1 : last + 1]) / (last - first),
        config.actor.simulated_step_s,
        (possible[last] - possible[first]) / (last - first),
        (ends[last] - ends[first]) / (last - first),
    )


def responses_s(run: RunDir, config: Config) -> list[list[float]]:
    """Seconds of each response in the order of tickets, [step][response]."""
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
    steps = []
    for step in range(config.steps):
        tickets = range(step * size, (step + 1) * size)
        steps.append(list(itertools.chain.from_iterable(map(seconds, tickets))))
    return steps


def schedule(responses: Sequence[Sequence[float]], config: Config, streaming: bool) -> list[float]:
    """Time at which each step is trained if only generation and training take time and the queue
    keeps its rules."""
    return Bound(responses, config, _WINDOWS if streaming else 1).trained()


HEAD = (
    "   G/T  sigma  staleness  streaming    G, s    T, s  ideal, s  possible, s  step, s  "
    "ideal/step  possible/step"
)


def line_of(result: Result) -> str:
    case = result.case
    return (
        f"{case.ratio:6.2f} {case.sigma:6.1f} {case.staleness:10d} "
        f"{'yes' if case.streaming else 'no':>10s} "
        f"{result.generate_s:7.3f} {result.train_s:7.3f} {result.ideal_s:9.3f} "
        f"{result.possible_s:12.3f} "
        f"{result.step_s:8.3f} {result.efficiency:11.3f} {result.possible_s / result.step_s:14.3f}"
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
        "--sigmas",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="sigmas of response times",
    )
    parser.add_argument("--step_s", type=float, default=1.0, help="G + T, seconds")
    parser.add_argument(
        "--steps", type=int, default=40, help=f"with {WARM_UP_STEPS} steps that are not measured"
    )
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    args = parser.parse_args()
    cases = [
        Case(ratio, sigma, staleness, streaming=staleness > 0)
        for sigma, staleness, ratio in itertools.product(args.sigmas, args.staleness, args.ratios)
    ]
    print(f"{HEAD}  load", flush=True)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for number, case in enumerate(cases):
            load_before = os.getloadavg()[0]
            result = measure(case, args.step_s, args.steps, Path(folder) / str(number))
            print(f"{line_of(result)}  {load_before:4.1f}", flush=True)
            extra = {"efficiency": result.efficiency, "load_before": load_before}
            results.append(asdict(result) | extra)
    if args.json:
        figures = [
            Figure(CASE_NAME.format(**values["case"]), values["efficiency"], "")
            for values in results
        ]
        settings = {"steps": args.steps, "load_before": results[0]["load_before"]}
        print_result(figures, settings, results=results)


if __name__ == "__main__":
    main()
