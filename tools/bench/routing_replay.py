"""What rollout routing replay is for, and what it costs, on small mixtures of experts.

    python tools/bench/routing_replay.py mismatch --seeds 0 1 2 --tokens 20000 --json
    python tools/bench/routing_replay.py cost --json
    python tools/bench/routing_replay.py learning --seeds 0 1 2 3 4 --steps 150 --keep runs/replay

`mismatch`: an SGLang server in bfloat16 draws from random models, a trainer in float32 scores the
tokens with its own routes and with the engine's. `cost`: CPU time and bytes of what is done for
routes alone. `learning`: the quickstart with experts, its engine in bfloat16, with and without
replay.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

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
AT_ONCE = 64
SCALE = 8.0
"""Of a random model's matrices, so that its distributions are far from even."""
QWEN3_30B = RouteShape(layers=48, experts=128, chosen=8)
LEARNS = {
    "model.tiny.num_experts": 8,
    "model.tiny.num_experts_per_tok": 2,
    "model.tiny.moe_intermediate_size": 96,
    # SGLang gives a mixture of experts an output layer of its own.
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
    parser.add_argument("what", choices=("mismatch", "cost", "learning"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--tokens", type=int, default=20_000, help="drawn with each seed")
    parser.add_argument("--rounds", type=int, default=5, help="of a step whose cost is measured")
    parser.add_argument("--steps", type=int, default=150, help="of a run that learns")
    parser.add_argument(
        "--keep", type=Path, help="folder for the run directories; default: none stays"
    )
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    args = parser.parse_args(argv)
    declare_fields("model.routing_replay", (ROUTES,))
    with tempfile.TemporaryDirectory() as scratch:
        root = (args.keep or Path(scratch)).absolute()
        measure = {"mismatch": mismatch, "cost": cost, "learning": learning}[args.what]
        figures = print_figures(
            measure(args, root), vars(args) | {"keep": str(args.keep)}, args.json
        )
    return 0 if all(figure.ok is not False for figure in figures) else 1


# -- mismatch --------------------------------------------------------------------------------------


def mismatch(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """Differences of the trainer's log-probabilities to the engine's, and ratios, without and with
    the routes."""
    from relax_hpc.training import parallel

    parallel.initialize_alone("cpu", 0, 600.0)
    found: dict[bool, list[np.ndarray]] = {False: [], True: []}
    equal = []
    for seed in args.seeds:
        model = random_model(root / f"model-{seed}", seed)
        rows = asyncio.run(drawn(model, root / f"logs-{seed}", args.tokens, seed))
        for routed in found:
            differences, share = compared(model, rows, routed)
            found[routed].append(differences)
        equal.append(share)
    off, on = ([float(one.mean()) for one in found[routed]] for routed in (False, True))
    less = [1.0 - after / before for before, after in zip(off, on, strict=True)]
    tails = {
        routed: [float(np.exp(np.quantile(one, 0.999))) for one in found[routed]]
        for routed in found
    }
    tokens = sum(len(one) for one in found[True])
    yield Figure("tokens", tokens, "", ">= 50,000", tokens >= 50_000)
    yield Figure("routes that are equal, replayed", median(equal), "", rounds=equal)
    yield Figure("mean mismatch, off", mean(off), "nats", rounds=off)
    yield Figure("mean mismatch, on", mean(on), "nats", rounds=on)
    yield Figure("mean mismatch, less by", mean(less), "", ">= 0.25", mean(less) >= 0.25, less)
    for routed, name in ((False, "off"), (True, "on")):
        whole = float(np.exp(np.quantile(np.concatenate(found[routed]), 0.999)))
        target = ("< 1.2", whole < 1.2) if routed else (None, None)
        yield Figure(f"99.9 % quantile of the ratio, {name}", whole, "", *target, tails[routed])


def random_model(directory: Path, seed: int) -> Path:
    """Four layers of 16 experts, four of them for each token."""
    from safetensors.torch import load_file, save_file

    shape = TinyModelConfig(
        num_layers=4, num_experts=16, num_experts_per_tok=4, tie_word_embeddings=False
    )
    make_tiny_model(directory, shape, seed)
    weights = load_file(directory / "model.safetensors")
    wide = {name: value * (SCALE if value.ndim > 1 else 1.0) for name, value in weights.items()}
    save_file(wide, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


async def drawn(model: Path, logs: Path, tokens: int, seed: int) -> list[dict[str, Any]]:
    """Rows of responses with at least so many tokens."""
    config = Config(seed=seed)
    config.model.routing_replay, config.rollout.engine.dtype = "on", "bfloat16"
    config.rollout.engine.flags = {
        "max_total_tokens": 32_768,
        "max_running_requests": AT_ONCE,
        "log_level": "error",
    }
    engine = make_engine(config, 0, model, SERVED, logs)
    draw, rows = np.random.default_rng(seed), list[dict[str, Any]]()
    await engine.start()
    try:
        while sum(len(row["drawn"]) for row in rows) < tokens:
            prompts = [tuple(draw.integers(3, VOCAB_SIZE, PROMPT).tolist()) for _ in range(AT_ONCE)]
            sampling = Sampling(1.0, 1.0, (), seed)
            requests = [
                GenerateRequest(prompt, "", k, sampling, RESPONSE)
                for k, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*map(engine.generate, requests))
            rows += [
                row_of(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True)
            ]
    finally:
        await engine.close()
    return rows


def row_of(prompt: tuple[int, ...], answer: Generation) -> dict[str, Any]:
    """What the trainer needs of a response."""
    routes = np.concatenate([answer.before[NAME], answer.extras[NAME]])
    ids = np.array([*prompt, *answer.token_ids], np.int32)
    return {"token_ids": ids, NAME: routes, "drawn": np.array(answer.logprobs, np.float32)}


def compared(model: Path, rows: Sequence[dict[str, Any]], routed: bool) -> tuple[np.ndarray, float]:
    """Of all sampled tokens |log-probability - the engine's|, and which share of the routes was the
    same."""
    from relax_hpc.training.models.batches import collate
    from relax_hpc.training.route_agreement import RouteAgreement

    policy, found = policy_of(model, ActorConfig()), []
    same = np.zeros(2)
    for start in range(0, len(rows), 16):
        part = rows[start : start + 16]
        batch = collate(part, 0, "cpu", also=policy.row_fields)
        (values,) = policy.batch_logprobs([batch], 1.0, routed)
        for line, row in zip(values.numpy(), part, strict=True):
            drawn = row["drawn"]
            found.append(
                np.abs(line[len(row["token_ids"]) - len(drawn) : len(row["token_ids"])] - drawn)
            )
        agreement = RouteAgreement([len(row["token_ids"]) for row in part])
        agreement.add(batch, range(len(part)), policy.pack_split, policy.router_tokens(batch))
        same += agreement.table.sum(1).numpy()
    return np.concatenate(found), float(same[0] / max(same[1], 1.0))


def policy_of(model: Path, actor: ActorConfig, replay: str = "on") -> Any:
    """In float32."""
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.hf_files import read_config

    policy = PolicyModel(
        read_config(model), ModelConfig(routing_replay=replay), actor.parallel, actor
    )
    policy.load_hf(model)
    return policy


# -- cost ------------------------------------------------------------------------------------------


def cost(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """CPU time of a step and of what of it is done for routes alone; bytes of rows."""
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
    answers = [answer_of(layout, seed) for seed in range(8)]
    steps = {replay: step_of(root / "model", replay) for replay in ("on", "off")}
    shares, whole = [], {replay: list[float]() for replay in steps}
    for number in range(args.rounds + 1):
        for replay, step in steps.items():
            with own_time(replay == "on") as own:
                spent = time.process_time()
                step(layout, answers)
                spent = time.process_time() - spent
            if number and replay == "on":
                shares.append(own[0] / spent)
            if number:
                whole[replay].append(spent)
    yield Figure("step, on", median(whole["on"]), "CPU s", rounds=whole["on"])
    yield Figure("step, off", median(whole["off"]), "CPU s", rounds=whole["off"])
    yield Figure(
        "R3's own CPU time of a step", median(shares), "", "< 0.01", median(shares) < 0.01, shares
    )
    yield from sizes(args)


def answer_of(shape: RouteShape, seed: int) -> dict[str, Any]:
    """As SGLang gives it: the last piece of a response."""
    import base64

    draw = np.random.default_rng(seed)
    chosen = draw.random((PROMPT + RESPONSE - 1, shape.layers, shape.experts)).argsort(-1)[
        ..., : shape.chosen
    ]
    routes = base64.b64encode(chosen.astype("<i4").tobytes()).decode()
    ids = draw.integers(3, VOCAB_SIZE, RESPONSE).tolist()
    meta = {"finish_reason": {"type": "length"}, "weight_version": str(SERVED), NAME: routes}
    return {
        "output_ids": ids,
        "meta_info": meta | {"output_token_logprobs": [[-0.5, 5, None]] * RESPONSE},
    }


def step_of(model: Path, replay: str) -> Callable[[RouteShape, Sequence[dict[str, Any]]], None]:
    """What is done with responses from the engine's answer to the optimizer's step, scored once and
    trained once."""
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

    async def generations(shape: RouteShape, answers: Sequence[dict[str, Any]]) -> list[Generation]:
        found = []
        for k, answer in enumerate(answers):
            request = GenerateRequest(prompt.token_ids, "p", k, Sampling(1.0, 1.0, (), 0), RESPONSE)
            response = StreamedResponse(request, SERVED, shape if replay == "on" else None)
            response.add(answer)
            found.append(await response.answer)
        return found

    def step(shape: RouteShape, answers: Sequence[dict[str, Any]]) -> None:
        rows = rows_of(prompt, 0, dict(enumerate(asyncio.run(generations(shape, answers)))))
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


@contextmanager
def own_time(on: bool) -> Iterator[list[float]]:
    """CPU seconds that are spent on routes while the body runs, in a list of one."""
    from relax_hpc.rollout import rows
    from relax_hpc.rollout.engines.sglang import stream
    from relax_hpc.training import route_agreement
    from relax_hpc.training.model import PolicyModel
    from relax_hpc.training.models.replay import RoutedLayer

    spent, inner = [0.0], [0.0]

    def timed(function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        begun, before = time.process_time(), inner[0]
        try:
            return function(*args, **named)
        finally:
            spent[0] += time.process_time() - begun - (inner[0] - before)

    def choosing(
        function: Callable[..., Any], layer: Any, scores: Any, topk: int, *about: Any
    ) -> Any:
        """Without the choice that the router would make in any case."""
        *groups, compute = about

        def counted(*args: Any, **named: Any) -> Any:
            begun = time.process_time()
            found = compute(*args, **named)
            inner[0] += time.process_time() - begun
            return found

        return timed(function, layer, scores, topk, *groups, counted)

    places = [
        (stream.ReceivedRoutes, "add"),
        (stream.StreamedResponse, "_all_routes"),
        (rows, "_extras"),
        (RouteShape, "fault"),
    ]
    places += [
        (PolicyModel, "_batch_routes"),
        (route_agreement.RouteAgreement, "add"),
        (route_agreement.RouteAgreement, "shares"),
    ]
    real = [
        (place, name, getattr(place, name))
        for place, name in [*places, (RoutedLayer, "get_replay_topk")]
    ]
    for place, name, function in real if on else ():
        how = choosing if name == "get_replay_topk" else timed
        setattr(place, name, _bound(how, function))
    try:
        yield spent
    finally:
        for place, name, function in real:
            setattr(place, name, function)


def _bound(how: Callable[..., Any], function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **named: how(function, *args, **named)


def sizes(args: argparse.Namespace) -> Iterator[Figure]:
    """Of rows of a model as Qwen3-30B-A3B."""
    from relax_hpc.queue.plan import UNSCORED
    from relax_hpc.queue.storage.shard import pack

    row = {
        "row_id": "000000000.00.00",
        "prompt_id": "p",
        **{
            "ticket": 0,
            "episode": 0,
            "row": 0,
            "prompt_len": 200,
            "spans": [],
            "finish_reason": "stop",
        },
        "token_ids": np.zeros(2000, np.int32),
        "loss_mask": np.ones(2000, np.uint8),
        "rollout_logprobs": np.zeros(2000, np.float32),
        "token_versions": np.ones(2000, np.int32),
        NAME: QWEN3_30B.without_routes(2000),
    }
    with_routes, without = (
        len(pack([row], fields, {})) for fields in ((*UNSCORED, NAME), UNSCORED)
    )
    token, wide = row[NAME][0].nbytes, 4 * QWEN3_30B.layers * QWEN3_30B.chosen
    yield Figure("bytes of a token's routes, 48 layers of 8 experts", token, "B")
    yield Figure("the same, against int32", token / wide, "", "0.25", token * 4 == wide)
    yield Figure("routes' share of the queue's bytes", 1 - without / with_routes, "")


# -- learning --------------------------------------------------------------------------------------


def learning(args: argparse.Namespace, root: Path) -> Iterator[Figure]:
    """Final held-out scores of the quickstart with experts, and the largest tail of ratios, by
    `routing_replay`."""
    from relax_hpc.base.metrics.read import read_metrics

    finals: dict[str, list[float]] = {"on": [], "off": []}
    tails: dict[str, list[float]] = {"on": [], "off": []}
    for seed in args.seeds:
        for replay, found in finals.items():
            run = learned(root / f"{replay}-seed-{seed}", replay, seed, args.steps)
            found.append(scores(run)[args.steps])
            ratios = [
                row["parity/ratio_p999"] for row in read_metrics(run) if "parity/ratio_p999" in row
            ]
            tails[replay].append(median(ratios))
    for replay in finals:
        yield Figure(f"held-out, {replay}", mean(finals[replay]), "", rounds=finals[replay])
        yield Figure(
            f"99.9 % quantile of the ratio, {replay}", mean(tails[replay]), "", rounds=tails[replay]
        )
    apart, low, high = difference(finals["on"], finals["off"])
    yield Figure("held-out, on - off", apart, "")
    yield Figure("95 % interval, from", low, "")
    yield Figure("95 % interval, to", high, "")


def learned(directory: Path, replay: str, seed: int, steps: int) -> Path:
    """A run directory; one that is there and finished is not made again."""
    options = {
        "run_dir": directory,
        "seed": seed,
        "steps": steps,
        "checkpoint.every": steps,
        "eval.every": steps,
    }
    options |= {"model.routing_replay": replay, **LEARNS}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    if not finished(directory, steps):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with (directory.parent / f"{directory.name}.txt").open("a") as output:
            command = [
                sys.executable,
                "-m",
                "relax_hpc",
                "run",
                "--config",
                str(QUICKSTART),
                *words,
            ]
            partial(subprocess.run, check=True, timeout=RUN_S)(
                command, stdout=output, stderr=output
            )
    return directory


if __name__ == "__main__":
    sys.exit(main())
