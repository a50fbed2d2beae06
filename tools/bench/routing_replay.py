"""Effect and cost of rollout routing replay with small mixtures of experts.

    python tools/bench/routing_replay.py mismatch --seeds 0 1 2 --tokens 20000 --json
    python tools/bench/routing_replay.py cost --json
    python tools/bench/routing_replay.py learning --seeds 0 1 2 3 4 --steps 150 --keep runs/replay

`mismatch`: an SGLang server in bfloat16 samples from random models, and a trainer in float32 scores
the tokens with its routes and with those of the engine. `cost`: CPU time and bytes for routes.
`learning`: the quickstart with experts and an engine in bfloat16, with and without replay.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import numpy as np
from curves import difference
from figures import Figure, print_figures
from quickstart_runs import finished, scores

from relax_hpc.base.fields import ROUTES, declare_fields
from relax_hpc.base.routes import NAME, RouteShape
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import ActorConfig, Config, ModelConfig, TinyModelConfig
from relax_hpc.rollout.engines import make_engine
from relax_hpc.rollout.engines.engine import GenerateRequest, Generation, Sampling
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.models.tiny_tokenizer import VOCAB_SIZE

QUICKSTART = Path(__file__).parents[2] / "configs" / "runs" / "quickstart.yaml"
SERVED = Version(1, 0)
PROMPT, RESPONSE = 16, 200
CONCURRENCY = 64
SCALE = 8.0
"""Factor of the matrices of a random model, so that its distributions are not uniform."""
QWEN3_30B = RouteShape(layers=48, experts=128, chosen=8)
LEARNS = {
    "model.tiny.num_experts": 8,
    "model.tiny.num_experts_per_tok": 2,
    "model.tiny.moe_intermediate_size": 96,
    # SGLang does not tie the output layer of a mixture of experts to its embedding.
    "model.tiny.tie_word_embeddings": "false",
    "algorithm.balance_coefficient": 0.01,
    "rollout.engine.dtype": "bfloat16",
}
RUN_S = 1800.0


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures of one command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("mismatch", "cost", "learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=20_000, help="sampled with each seed")
    parser.add_argument("--rounds", type=int, default=5, help="steps whose cost is measured")
    parser.add_argument("--steps", type=int, default=150, help="steps of a run that learns")
    parser.add_argument(
        "--keep", type=Path, help="folder for the run directories; default: they are deleted"
    )
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    args = parser.parse_args(argv)
    declare_fields("model.routing_replay", (ROUTES,))
    with tempfile.TemporaryDirectory() as scratch:
        root = (args.keep or Path(scratch)).absolute()
        measure = {"mismatch": mismatch, "cost": cost, "learning": learning}[args.command]
        figures = print_figures(
            measure(args, root), vars(args) | {"keep": str(args.keep)}, args.json
        )
    return 0 if all(figure.ok is not False for figure in figures) else 1


# -- mismatch --------------------------------------------------------------------------------------


def mismatch(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """Differences between log-probabilities of trainer and engine, and their ratios.

    The trainer scores without and with the routes of the engine.
    """
    from relax_hpc.training import parallel

    parallel.initialize_alone("cpu", 0, 600.0)
    differences: dict[bool, list[np.ndarray]] = {False: [], True: []}
    equal_shares = []
    for seed in args.seeds:
        model = random_model(root / f"model-{seed}", seed)
        rows = asyncio.run(sample_rows(model, root / f"logs-{seed}", args.tokens, seed))
        for routed, values in differences.items():
            distances, share = compare_logprobs(model, rows, routed)
            values.append(distances)
        equal_shares.append(share)
    off = [float(values.mean()) for values in differences[False]]
    on = [float(values.mean()) for values in differences[True]]
    reductions = [1.0 - after / before for before, after in zip(off, on, strict=True)]
    reduction = mean(reductions)
    tokens = sum(map(len, differences[True]))
    yield Figure("tokens", tokens, "", ">= 50,000", tokens >= 50_000)
    yield Figure("routes that are equal, replayed", median(equal_shares), "", rounds=equal_shares)
    yield Figure("mean mismatch, off", mean(off), "nats", rounds=off)
    yield Figure("mean mismatch, on", mean(on), "nats", rounds=on)
    yield Figure("mean mismatch, less by", reduction, "", ">= 0.25", reduction >= 0.25, reductions)
    for routed, name in ((False, "off"), (True, "on")):
        ratio = ratio_tail(np.concatenate(differences[routed]))
        tails = list(map(ratio_tail, differences[routed]))
        target = ("< 1.2", ratio < 1.2) if routed else (None, None)
        yield Figure(f"99.9 % quantile of the ratio, {name}", ratio, "", *target, tails)


def ratio_tail(differences: np.ndarray) -> float:
    """99.9 % quantile of the ratios of probabilities, from differences of log-probabilities."""
    return float(np.exp(np.quantile(differences, 0.999)))


def random_model(directory: Path, seed: int) -> Path:
    """Write a model with four layers of 16 experts, of which each token has four."""
    from safetensors.torch import load_file, save_file

    shape = TinyModelConfig(
        num_layers=4, num_experts=16, num_experts_per_tok=4, tie_word_embeddings=False
    )
    make_tiny_model(directory, shape, seed)
    weights = load_file(directory / "model.safetensors")
    wide = {name: value * (SCALE if value.ndim > 1 else 1.0) for name, value in weights.items()}
    save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def sample_rows(model: Path, logs: Path, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Rows whose responses have at least ``tokens`` tokens together."""
    config = Config(seed=seed)
    config.model.routing_replay, config.rollout.engine.dtype = "on", "bfloat16"
    config.rollout.engine.flags = {
        "max_total_tokens": 32_768,
        "max_running_requests": CONCURRENCY,
        "log_level": "error",
    }
    engine = make_engine(config, 0, model, SERVED, logs)
    generator = np.random.default_rng(seed)
    rows: list[dict[str, Any]] = []
    await engine.start()
    try:
        while sum(len(row["logprobs"]) for row in rows) < tokens:
            prompts = generator.integers(3, VOCAB_SIZE, (CONCURRENCY, PROMPT)).tolist()
            sampling = Sampling(1.0, 1.0, (), seed)
            requests = [
                GenerateRequest(tuple(prompt), "", number, sampling, RESPONSE)
                for number, prompt in enumerate(prompts)
            ]
            responses = await asyncio.gather(*map(engine.generate, requests))
            rows += map(row_of, prompts, responses)
    finally:
        await engine.close()
    return rows


def row_of(prompt: Sequence[int], response: Generation) -> dict[str, Any]:
    """Tokens, routes, and log-probabilities of the response by the engine."""
    routes = np.concatenate([response.before[NAME], response.extras[NAME]])
    ids = np.array([*prompt, *response.token_ids], np.int32)
    return {"token_ids": ids, NAME: routes, "logprobs": np.array(response.logprobs, np.float32)}


def compare_logprobs(
    model: Path, rows: Sequence[dict[str, Any]], routed: bool
) -> tuple[np.ndarray, float]:
    """Absolute differences between log-probabilities of trainer and engine for all sampled tokens,
    and the share of routes that are equal.

    ``routed``: the trainer uses the routes of the engine.
    """
    from relax_hpc.training.models.batches import collate
    from relax_hpc.training.route_agreement import RouteAgreement

    policy = policy_of(model, ActorConfig())
    differences = []
    # Number of equal routes and of all routes.
    counts = np.zeros(2)
    for start in range(0, len(rows), 16):
        samples = rows[start : start + 16]
        batch = collate(samples, 0, "cpu", also=policy.row_fields)
        (values,) = policy.batch_logprobs([batch], 1.0, routed)
        lengths = [len(row["token_ids"]) for row in samples]
        for line, row, length in zip(values.numpy(), samples, lengths, strict=True):
            expected = row["logprobs"]
            differences.append(np.abs(line[length - len(expected) : length] - expected))
        agreement = RouteAgreement(lengths)
        agreement.add(batch, range(len(samples)), policy.pack_split, policy.router_tokens(batch))
        counts += agreement.table.sum(1).numpy()
    return np.concatenate(differences), float(counts[0] / max(counts[1], 1.0))


def policy_of(model: Path, actor: ActorConfig, replay: str = "on") -> Any:
    """The model in float32."""
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.hf_files import read_config

    policy = PolicyModel(
        read_config(model), ModelConfig(routing_replay=replay), actor.parallel, actor
    )
    policy.load_hf(model)
    return policy


# -- cost ------------------------------------------------------------------------------------------


def cost(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """CPU time of a step, and of the functions in it that handle routes; bytes of rows."""
    from relax_hpc.training import parallel

    parallel.initialize_alone("cpu", 0, 600.0)
    shape = TinyModelConfig(
        hidden_size=512,
        num_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=32,
    )
    shape.num_experts_per_tok, shape.moe_intermediate_size = 4, 256
    make_tiny_model(root / "model", shape, 0)
    layout = RouteShape(shape.num_layers, shape.num_experts, shape.num_experts_per_tok)
    responses = [random_response(layout, seed) for seed in range(8)]
    steps = {replay: step_of(root / "model", replay) for replay in ("on", "off")}
    shares: list[float] = []
    step_s: dict[str, list[float]] = {replay: [] for replay in steps}
    for number in range(args.rounds + 1):
        for replay, step in steps.items():
            with timed_routes(replay == "on") as times:
                started = time.process_time()
                step(layout, responses)
                spent_s = time.process_time() - started
            # The first round loads code and is not counted.
            if number and replay == "on":
                shares.append(times.routes_s / spent_s)
            if number:
                step_s[replay].append(spent_s)
    yield Figure("step, on", median(step_s["on"]), "CPU s", rounds=step_s["on"])
    yield Figure("step, off", median(step_s["off"]), "CPU s", rounds=step_s["off"])
    share = median(shares)
    yield Figure("R3's own CPU time of a step", share, "", "< 0.01", share < 0.01, shares)
    yield from sizes(args)


def random_response(shape: RouteShape, seed: int) -> dict[str, Any]:
    """Last piece of a response in the format of SGLang."""
    import base64

    generator = np.random.default_rng(seed)
    scores = generator.random((PROMPT + RESPONSE - 1, shape.layers, shape.experts))
    chosen = scores.argsort(-1)[..., : shape.chosen]
    routes = base64.b64encode(chosen.astype("<i4").tobytes()).decode()
    ids = generator.integers(3, VOCAB_SIZE, RESPONSE).tolist()
    meta = {"finish_reason": {"type": "length"}, "weight_version": str(SERVED), NAME: routes}
    return {
        "output_ids": ids,
        "meta_info": meta | {"output_token_logprobs": [[-0.5, 5, None]] * RESPONSE},
    }


def step_of(model: Path, replay: str) -> Callable[[RouteShape, Sequence[dict[str, Any]]], None]:
    """Function that takes responses of the engine and scores and trains them once."""
    from relax_hpc.algorithms import Grpo
    from relax_hpc.data.prompts import Prompt
    from relax_hpc.queue.plan import UNSCORED
    from relax_hpc.queue.storage.shard import pack, unpack
    from relax_hpc.rollout.engines.sglang.stream import StreamedResponse
    from relax_hpc.rollout.rows import bad_routes, rows_of
    from relax_hpc.training.models.batches import collate
    from relax_hpc.training.route_agreement import RouteAgreement
    from relax_hpc.training.trainer import Trainer

    policy = policy_of(model, ActorConfig(), replay)
    trainer = Trainer.from_settings(policy, Grpo(), ActorConfig(), 1.0)
    prompt = Prompt("p", tuple(range(3, 3 + PROMPT)), "", "")

    async def read_responses(
        shape: RouteShape, responses: Sequence[dict[str, Any]]
    ) -> dict[int, Generation]:
        """Results by the number of the sample."""
        results = {}
        for number, piece in enumerate(responses):
            request = GenerateRequest(
                prompt.token_ids, "p", number, Sampling(1.0, 1.0, (), 0), RESPONSE
            )
            response = StreamedResponse(request, SERVED, shape if replay == "on" else None)
            response.add(piece)
            results[number] = await response.answer
        return results

    def step(shape: RouteShape, responses: Sequence[dict[str, Any]]) -> None:
        rows = rows_of(prompt, 0, asyncio.run(read_responses(shape, responses)))
        also = (NAME,) if replay == "on" else ()
        assert not also or bad_routes(shape, rows) is None
        rows = list(unpack(pack(rows, (*UNSCORED, *also), {})).values())
        assert not also or not any(map(shape.find_fault, rows))
        rows = [row | {"advantages": np.ones(len(row["token_ids"]), np.float32)} for row in rows]
        batch = collate(rows, 0, "cpu", also=policy.row_fields)
        (batch.fields["old_logprobs"],) = policy.batch_logprobs([batch], 1.0)
        trainer.accumulate([batch])
        if also:
            agreement = RouteAgreement([len(row["token_ids"]) for row in rows])
            agreement.add(batch, range(len(rows)), policy.pack_split, policy.router_tokens(batch))
            agreement.shares()
        trainer.step(1e-6)

    return step


@dataclass(slots=True)
class RouteTimes:
    """CPU seconds in functions that handle routes."""

    routes_s: float = 0.0
    choice_s: float = 0.0
    """Seconds in which routers choose experts. They do this without replay too."""

    def time_function(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that adds its time, without that of choices in it."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started, choice_before_s = time.process_time(), self.choice_s
            try:
                return function(*args, **kwargs)
            finally:
                total_s = time.process_time() - started
                self.routes_s += total_s - (self.choice_s - choice_before_s)

        return timed

    def time_choice(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        """A router's choice of experts that adds its time to `choice_s`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time()
            chosen = compute(*args, **kwargs)
            self.choice_s += time.process_time() - started
            return chosen

        return timed

    def time_replay(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`RoutedLayer.get_replay_topk`, whose last argument is the router's choice."""
        timed = self.time_function(function)

        def timed_without_choice(*args: Any) -> Any:
            return timed(*args[:-1], self.time_choice(args[-1]))

        return timed_without_choice


@contextmanager
def timed_routes(enabled: bool) -> Iterator[RouteTimes]:
    """If ``enabled``, measure the functions that handle routes while the block runs."""
    from relax_hpc.rollout import rows
    from relax_hpc.rollout.engines.sglang import stream
    from relax_hpc.training import route_agreement
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.replay import RoutedLayer

    times = RouteTimes()
    functions: list[tuple[Any, str]] = [
        (stream.ReceivedRoutes, "add"),
        (stream.StreamedResponse, "_all_routes"),
        (rows, "_extras"),
        (RouteShape, "find_fault"),
        (PolicyModel, "_batch_routes"),
        (route_agreement.RouteAgreement, "add"),
        (route_agreement.RouteAgreement, "shares"),
    ]
    with ExitStack() as patches:
        if enabled:
            for owner, name in functions:
                timed = times.time_function(getattr(owner, name))
                patches.enter_context(patch.object(owner, name, timed))
            replay = times.time_replay(RoutedLayer.get_replay_topk)
            patches.enter_context(patch.object(RoutedLayer, "get_replay_topk", replay))
        yield times


def sizes(args: argparse.Namespace) -> Iterator[Figure]:
    """Bytes of rows of a model with the shape of Qwen3-30B-A3B."""
    from relax_hpc.queue.plan import UNSCORED
    from relax_hpc.queue.storage.shard import pack

    row = {
        "row_id": "000000000.00.00",
        "prompt_id": "p",
        "ticket": 0,
        "episode": 0,
        "row": 0,
        "prompt_len": 200,
        "spans": [],
        "finish_reason": "stop",
        "token_ids": np.zeros(2000, np.int32),
        "loss_mask": np.ones(2000, np.uint8),
        "rollout_logprobs": np.zeros(2000, np.float32),
        "token_versions": np.ones(2000, np.int32),
        NAME: QWEN3_30B.without_routes(2000),
    }
    bytes_without_routes = len(pack([row], UNSCORED, {}))
    bytes_with_routes = len(pack([row], (*UNSCORED, NAME), {}))
    token_bytes = row[NAME][0].nbytes
    int32_bytes = 4 * QWEN3_30B.layers * QWEN3_30B.chosen
    share = token_bytes / int32_bytes
    yield Figure("bytes of a token's routes, 48 layers of 8 experts", token_bytes, "B")
    yield Figure("the same, against int32", share, "", "0.25", share == 0.25)
    yield Figure(
        "routes' share of the queue's bytes", 1 - bytes_without_routes / bytes_with_routes, ""
    )


# -- learning --------------------------------------------------------------------------------------


def learning(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """Final held-out scores of the quickstart with experts, and the tail of ratios.

    Runs are made with and without replay.
    """
    from relax_hpc.base.metrics.read import read_metrics

    finals: dict[str, list[float]] = {"on": [], "off": []}
    tails: dict[str, list[float]] = {"on": [], "off": []}
    for seed in args.seeds:
        for replay in finals:
            run = train(root / f"{replay}-seed-{seed}", replay, seed, args.steps)
            finals[replay].append(scores(run)[args.steps])
            tag = "parity/ratio_p999"
            tails[replay].append(median(row[tag] for row in read_metrics(run) if tag in row))
    for replay in finals:
        yield Figure(f"held-out, {replay}", mean(finals[replay]), "", rounds=finals[replay])
        name = f"99.9 % quantile of the ratio, {replay}"
        yield Figure(name, mean(tails[replay]), "", rounds=tails[replay])
    apart, low, high = difference(finals["on"], finals["off"])
    yield Figure("held-out, on - off", apart, "")
    yield Figure("95 % interval, from", low, "")
    yield Figure("95 % interval, to", high, "")


def train(directory: Path, replay: str, seed: int, steps: int) -> Path:
    """Make a run in ``directory``, if it has no finished one. Return the directory."""
    if finished(directory, steps):
        return directory
    options = {
        "run_dir": directory,
        "seed": seed,
        "steps": steps,
        "checkpoint.every": steps,
        "eval.every": steps,
        "model.routing_replay": replay,
        **LEARNS,
    }
    command = [sys.executable, "-m", "relax_hpc", "run", "--config", str(QUICKSTART)]
    command += [f"--{name}={value}" for name, value in options.items()]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / f"{directory.name}.txt").open("a") as output:
        subprocess.run(command, check=True, timeout=RUN_S, stdout=output, stderr=output)
    return directory


if __name__ == "__main__":
    sys.exit(main())
