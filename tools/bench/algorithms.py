"""What each algorithm's advantages and loss take of a training step, and what a critic and a
teacher's likeliest tokens add to one.

A step here is the forward and backward pass of a small model over all rows and the optimizer's
step, on one device; of a larger model the share is smaller. Advantages are made in the hub, beside
it: their time counts as if it were not. A critic scores the rows and trains on them; its yardstick
is a policy of the same size that does that. Of a teacher and its student it is the output layer
alone, with a vocabulary as of Qwen3. Rounds alternate; on a CPU seconds are those of the processor,
which a busy machine does not change.

    python tools/bench/algorithms.py --json
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path

import numpy as np
import torch
from figures import Figure, print_figures

from relax_hpc.algorithms import ALGORITHMS, Algorithm, Distill, Grpo, Ppo
from relax_hpc.config.schema import ActorConfig, ModelConfig, ParallelConfig, TinyModelConfig
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.roles.advantages import advantages_of
from relax_hpc.training import logprobs, parallel
from relax_hpc.training.critic import CriticModel, CriticTrainer
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, Batch, collate, split_rows
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.trainer import Trainer, token_batch

SHAPE = TinyModelConfig(
    hidden_size=256,
    num_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
    intermediate_size=1024,
)
START_TIMEOUT_S = 60.0
SHARE, CRITIC = 2.0, 1.0
TOP_K = 16
"""Likeliest tokens of a teacher."""
OUTPUT_TOKENS, OUTPUT_VOCAB = 512, 151_936
LIKELIEST = Distill(divergence="jsd", teacher_top_k=TOP_K)
SETTINGS = {"reduction": "constant", "constant_tokens": 1024, "whiten": True, "kl_in_reward": 0.01}
"""Of a further line: what all algorithms may have and is computed beside them."""


def step_rows(options: argparse.Namespace) -> list[Row]:
    """Of a step, with all fields that any algorithm looks at; a prompt of a quarter of the tokens,
    and a response."""
    draw, made = np.random.default_rng(0), []
    for ticket in range(options.prompts):
        for episode in range(options.samples):
            mask = np.arange(options.tokens) >= options.tokens // 4
            near = {
                name: (draw.normal(-2, 0.3, options.tokens) * mask).astype(np.float32)
                for name in (
                    "rollout_logprobs",
                    "old_logprobs",
                    "ref_logprobs",
                    "teacher_logprobs",
                    "values",
                )
            }
            made.append(
                {
                    "row_id": row_id(ticket, episode, 0),
                    "ticket": ticket,
                    "token_ids": draw.integers(3, 60, options.tokens).astype(np.int32),
                    "loss_mask": mask.astype(np.uint8),
                    "token_versions": mask.astype(np.int32),
                    "reward": float(draw.integers(0, 3)),
                    "teacher_top_ids": np.tile(
                        np.arange(TOP_K, dtype=np.int32), (options.tokens, 1)
                    ),
                    "teacher_top_logprobs": np.full(
                        (options.tokens, TOP_K), -np.log(2 * TOP_K), np.float32
                    ),
                    **near,
                }
            )
    return made


def taken(work: Callable[[], object], device: str) -> float:
    """Seconds: of the clock, or on a CPU of the processor."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    begun = clock()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return clock() - begun


def losses(algorithm: Algorithm, batches: list[Batch]) -> None:
    """Forward and backward of the loss alone, from log-probabilities to their gradient."""
    for batch in batches:
        scores = batch.fields["old_logprobs"].clone()
        if k := algorithm.teacher_top_k:
            scores = torch.cat(
                [scores[..., None], batch.fields["teacher_top_logprobs"][..., :k] - 0.1], -1
            )
        scores.requires_grad_()
        algorithm.loss(token_batch(batch, scores, None))[0].backward()


def train(trainer: Trainer, batches: list[Batch]) -> None:
    trainer.accumulate(batches)
    trainer.step(1e-6)


def shares(directory: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Of each algorithm, over the step of a policy."""
    trainer = Trainer.from_settings(
        policy(PolicyModel, directory, options), Grpo(), ActorConfig(), 1.0
    )
    rows, device = step_rows(options), trainer.model.device
    packs = split_rows(rows, options.pack)
    algorithms = {name: make() for name, make in ALGORITHMS.items()}
    algorithms |= {"grpo, all settings": Grpo(**SETTINGS), f"distill, {TOP_K} likeliest": LIKELIEST}
    spent: dict[str, list[tuple[float, float, float]]] = {name: [] for name in algorithms}
    usual = micro_batches(packs, Grpo(), device)
    for number in range(options.rounds + 1):
        step = taken(lambda: train(trainer, usual), options.device)
        for name, algorithm in algorithms.items():
            batches = micro_batches(packs, algorithm, device)
            of_advantages = taken(lambda one=algorithm: advantages_of(rows, one, 0), "cpu")
            of_loss = taken(lambda one=algorithm, known=batches: losses(one, known), options.device)
            if number:
                spent[name].append((of_advantages, of_loss, step))
    step_s = statistics.median(step for *_, step in spent["grpo"])
    yield Figure(f"a step of {sum(len(row['token_ids']) for row in rows)} tokens", step_s, "s")
    for name, rounds in spent.items():
        both = [100 * (a + b) / step for a, b, step in rounds]
        share = statistics.median(both)
        yield Figure(
            f"{name}: advantages and loss",
            share,
            "% of a step",
            f"<= {SHARE:g}",
            share <= SHARE,
            both,
        )


def micro_batches(
    packs: list[list[Row]], algorithm: Algorithm, device: torch.device
) -> list[Batch]:
    """Of rows with what the algorithm gives them."""
    rows = sorted((row for pack in packs for row in pack), key=itemgetter("row_id"))
    made = {one["row_id"]: one for one in advantages_of(rows, algorithm, 0)}
    packs = [[row | made[row["row_id"]] for row in pack] for pack in packs]
    unseen = [] if algorithm.teacher_top_k else ["teacher_top_ids", "teacher_top_logprobs"]
    return [collate([without(row, unseen) for row in pack], PAD, device) for pack in packs]


def without(row: Row, fields: list[str]) -> Row:
    return {name: value for name, value in row.items() if name not in fields}


def alternated(
    ways: dict[str, Callable[[], object]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Seconds of each round, but for a first one."""
    spent: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(options.rounds + 1):
        for name, work in ways.items():
            seconds = taken(work, options.device)
            if number:
                spent[name].append(seconds)
    return spent


def of_critic(directory: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """What it adds, against a policy's forward pass over the rows and its training on them."""
    actor = Trainer.from_settings(
        policy(PolicyModel, directory, options), Ppo(), ActorConfig(), 1.0
    )
    critic = CriticTrainer.from_settings(
        policy(CriticModel, directory, options), Ppo(), ActorConfig(), 1.0
    )
    rows, device = step_rows(options), actor.model.device
    packs = split_rows(rows, options.pack)
    batches = micro_batches(packs, Ppo(), device)
    ways: dict[str, Callable[[], object]] = {
        "policy: a forward pass": lambda: actor.model.forward_logprobs(batches, 1.0),
        "policy: forward, backward, step": lambda: train(actor, batches),
        "critic: values": lambda: critic.model.forward_values(batches),
        "critic: forward, backward, step": lambda: train(critic, batches),
    }
    spent = alternated(ways, options)
    for name, rounds in spent.items():
        yield Figure(name, statistics.median(rounds), "s", rounds=rounds)
    forward, trained, values, learned = spent.values()
    ratios = [
        (c + d) / (a + b) for a, b, c, d in zip(forward, trained, values, learned, strict=True)
    ]
    ratio = statistics.median(ratios)
    yield Figure("critic against a policy's", ratio, "x", f"<= {CRITIC:g}", ratio <= CRITIC, ratios)


def of_likeliest(options: argparse.Namespace) -> Iterator[Figure]:
    """What the likeliest tokens add to the output layer of a teacher, and of a student, whose
    layers below it have nothing to do with them."""
    draw = torch.Generator().manual_seed(0)
    states = (
        torch.randn(OUTPUT_TOKENS, SHAPE.hidden_size, generator=draw)
        .to(options.device)
        .requires_grad_()
    )
    weight = (
        torch.randn(OUTPUT_VOCAB, SHAPE.hidden_size, generator=draw)
        .to(options.device)
        .requires_grad_()
    )
    drawn = torch.randint(0, OUTPUT_VOCAB, (OUTPUT_TOKENS,), generator=draw).to(options.device)
    group = torch.distributed.group.WORLD
    layer = states, weight, drawn, OUTPUT_VOCAB
    several = torch.cat(
        [drawn[:, None], drawn[:, None] // torch.arange(2, TOP_K + 2, device=options.device)], 1
    )

    def scored(targets: torch.Tensor) -> torch.Tensor:
        return logprobs.token_logprobs(states, weight, targets, OUTPUT_VOCAB, 1.0, group)[0]

    ways: dict[str, Callable[[], object]] = {
        "teacher's output layer: the drawn tokens": lambda: scored(drawn),
        f"teacher's output layer: and the {TOP_K} likeliest": lambda: logprobs.likeliest(
            *layer, OUTPUT_VOCAB, TOP_K, 1.0, group
        ),
        "student's output layer: the drawn tokens": lambda: scored(drawn).sum().backward(),
        f"student's output layer: and the {TOP_K} likeliest": lambda: (
            scored(several).sum().backward()
        ),
    }
    spent = alternated(ways, options)
    for name, rounds in spent.items():
        yield Figure(name, statistics.median(rounds), "s", rounds=rounds)
    bare, whole, alone, both = spent.values()
    for who, more, less in (("teacher", whole, bare), ("student", both, alone)):
        ratios = [a / b for a, b in zip(more, less, strict=True)]
        yield Figure(
            f"{who}'s with the likeliest against without",
            statistics.median(ratios),
            "x",
            rounds=ratios,
        )


def policy(kind: type[PolicyModel], directory: Path, options: argparse.Namespace) -> PolicyModel:
    model = kind(
        read_config(directory), ModelConfig(device=options.device), ParallelConfig(), ActorConfig()
    )
    model.load_hf(directory)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", type=Path, help="Hugging Face directory; a small one is made without it"
    )
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pack", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    parallel.initialize_alone(options.device, 0, START_TIMEOUT_S)
    with tempfile.TemporaryDirectory() as folder:
        directory = options.model or Path(folder) / "model"
        if not options.model:
            make_tiny_model(directory, SHAPE, seed=0)
        figures = itertools.chain(
            shares(directory, options), of_critic(directory, options), of_likeliest(options)
        )
        print_figures(figures, {"device": options.device, "rounds": options.rounds}, options.json)
    parallel.destroy()


if __name__ == "__main__":
    main()
