"""sft and dpo: losses compared with independent ones, refused settings, and whole runs whose rows
come from files."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.nn.functional import cross_entropy

from relax_hpc.algorithms import Dpo, Sft
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.algorithms.losses import mean_metrics
from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.metrics.tags import find_declared_tag
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.commands.program import main
from relax_hpc.config import load
from relax_hpc.config.schema import DataConfig, TinyModelConfig
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.examples.tasks.sort_digits import SortDigitPairs
from relax_hpc.ops.checks.settings import check
from relax_hpc.queue.plan import Plan
from relax_hpc.roles.data import rows_of
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.tasks.files import open_train
from relax_hpc.training import parallel
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import PAD, collate
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.optimizer import learning_rate
from relax_hpc.training.trainer import Trainer
from tests.helpers.audit import audit
from tests.helpers.run_helpers import SMALL, Running, queue_rows, running
from tests.requirements import requires

requires("torch", "megatron", "transformers")

RUN_S = 240.0
BETA = 0.3


def token_batch(lengths: Sequence[int], seed: int = 0) -> TokenBatch:
    """Rows with ``lengths`` trained tokens after two tokens of the prompt, in float64. Their
    log-probabilities have gradients."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(lengths), max(lengths) + 2
    logprobs, reference = torch.randn(2, *shape, generator=generator, dtype=torch.float64)
    position = torch.arange(shape[1])
    mask = ((position >= 2) & (position < 2 + torch.tensor(lengths)[:, None])).double()
    return TokenBatch(logprobs=logprobs.requires_grad_(), mask=mask, ref_logprobs=reference)


def expected_dpo(batch: TokenBatch, smoothing: float = 0.0, ipo: bool = False) -> list[float]:
    """Loss of each pair in numpy. Rows are chosen, rejected, chosen, ...

    The formulas are those of DPOTrainer of TRL 1.16 for `sigmoid` and `ipo`, and of the note on
    noisy labels.
    """
    mask = np.array(batch.mask)
    scores = (mask * np.array((batch.logprobs - batch.ref_logprobs).detach())).sum(1)
    if ipo:
        scores /= mask.sum(1)
    margins = scores[::2] - scores[1::2]
    if ipo:
        return [*((margins - 1 / (2 * BETA)) ** 2)]
    preferred = 1 / (1 + np.exp(-BETA * margins))
    return [*(-(1 - smoothing) * np.log(preferred) - smoothing * np.log(1 - preferred))]


@pytest.mark.parametrize("settings", [{}, {"label_smoothing": 0.2}, {"preference": "ipo"}])
def test_the_loss_of_pairs_and_its_gradient_are_those_of_the_formulas(
    settings: dict[str, Any],
) -> None:
    batch, algorithm = token_batch([3, 5, 4, 1, 2, 2]), Dpo(beta=BETA, **settings)
    loss, metrics = algorithm.loss(batch)
    expected = expected_dpo(batch, settings.get("label_smoothing", 0.0), "preference" in settings)
    assert loss.item() == pytest.approx(sum(expected)) and metrics["weight"] == 3
    loss.backward()
    slope, step = batch.logprobs.grad.clone(), 1e-6
    for row, column in ((0, 2), (0, 4), (1, 3), (3, 2), (3, 4), (5, 0)):
        moved = [batch.logprobs.detach().clone() for _ in range(2)]
        for values, sign in zip(moved, (1, -1), strict=True):
            values[row, column] += sign * step
        up, down = (float(algorithm.loss(batch.replace(logprobs=values))[0]) for values in moved)
        assert slope[row, column].item() == pytest.approx((up - down) / (2 * step), abs=1e-8)
    means = mean_metrics({name: float(value) for name, value in metrics.items()})
    assert means["loss/policy"] == pytest.approx(np.mean(expected))
    assert means["preference/margin"] == pytest.approx(
        means["preference/chosen"] - means["preference/rejected"]
    )
    lines = zip(np.array(batch.mask), np.array(batch.ref_logprobs), strict=True)
    rows = [{"loss_mask": mask, "ref_logprobs": reference} for mask, reference in lines]
    held_out = algorithm.held_out(rows, [*np.array(batch.logprobs.detach())])
    assert held_out["loss"] == pytest.approx(np.mean(expected))
    assert held_out["accuracy"] == pytest.approx(means["preference/accuracy"])


def test_a_rank_without_a_pair_adds_nothing() -> None:
    pairs, idle = token_batch([3, 5]), token_batch([1])
    idle = idle.replace(mask=torch.zeros_like(idle.mask))
    loss, metrics = Dpo().loss(idle)
    loss.backward()
    assert loss == 0 == metrics["weight"] and not idle.logprobs.grad.any()
    assert metrics.keys() == Dpo().loss(pairs)[1].keys()
    with pytest.raises(ValueError, match="no ref_logprobs"):
        Dpo().loss(pairs.replace(ref_logprobs=None))


def test_the_loss_of_demonstrations_is_the_cross_entropy_of_torch() -> None:
    logits = torch.randn(2, 6, 11, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(11, (2, 6))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [0, 1, 1, 0, 0, 0]]).double()
    logprobs = logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    batch = TokenBatch(logprobs=logprobs, mask=mask)
    theirs = tokens.masked_fill(mask == 0, -100)
    by_token = cross_entropy(logits.flatten(0, 1), theirs.flatten())
    by_row = torch.stack([cross_entropy(*pair) for pair in zip(logits, theirs, strict=True)]).mean()
    for algorithm, expected in ((Sft(), by_token), (Sft(reduction="sequence_mean"), by_row)):
        loss, metrics = algorithm.loss(batch)
        mean = loss / metrics["weight"]
        assert mean.item() == pytest.approx(expected.item())
        (gradient,) = torch.autograd.grad(mean, logits, retain_graph=True)
        (expected_gradient,) = torch.autograd.grad(expected, logits, retain_graph=True)
        assert torch.allclose(gradient, expected_gradient)
    rows = [{"loss_mask": np.array(line)} for line in mask]
    assert Sft().held_out(rows, [*np.array(logprobs.detach())])["loss"] == pytest.approx(
        by_token.item()
    )


def settings(algorithm: str, **others: Any) -> dict[str, Any]:
    name = "SortDigitPairs" if algorithm == "dpo" else "SortDigits"
    task = f"relax_hpc.examples.tasks.sort_digits:{name}"
    return {"data.task": task, "data.max_row_tokens": 64, "algorithm.name": algorithm, **others}


def test_a_run_of_files_has_only_the_needed_roles_of_a_cluster(tmp_path: Path) -> None:
    cluster = Path("configs/clusters/2-nodes.yaml")
    sft, dpo = (load([cluster], settings(name, layout="local")) for name in ("sft", "dpo"))
    roles = {name: group.roles for name, group in sft.groups.items()}
    assert roles == {"hub": ["api", "data"], "actor": ["actor"]}
    assert sft.actor.forward == dpo.actor.forward == [], "there are no old log-probabilities"
    assert dpo.groups["reference"].roles == ["reference"]
    assert dpo.groups.keys() == {"hub", "actor", "reference"}
    assert (sft.samples_per_prompt, dpo.samples_per_prompt, sft.weights.file_every) == (1, 2, 0)
    inside = load([], settings("dpo") | {"actor.forward": ["reference"]})
    assert inside.groups.keys() == {"hub", "actor"} and not check(inside)
    plans = [Plan.from_config(config) for config in (sft, dpo)]
    assert [plan.tasks["actor"].needs for plan in plans] == [
        ("token_ids", "reward"),
        ("token_ids", "reward", "ref_logprobs"),
    ]
    assert [plan.compares for plan in plans] == [False, True]
    assert all(plan.tasks["actor"].in_order for plan in plans)


@pytest.mark.parametrize(
    ("algorithm", "overrides", "message"),
    [
        ("sft", {"rollout.reward": "math"}, "rollout.reward: found 'math', allowed with sft: ''"),
        ("sft", {"max_staleness": 1}, "max_staleness: found 1, allowed with sft: 0"),
        (
            "sft",
            {"algorithm.kl.coefficient": 0.1},
            "algorithm.kl.coefficient: found 0.1, allowed with sft: 0.0",
        ),
        ("sft", {"samples_per_prompt": 4}, "samples_per_prompt: found 4, allowed with sft: 1"),
        (
            "sft",
            {"groups.critic.roles": ["critic"]},
            "groups: found role critic with algorithm sft",
        ),
        (
            "sft",
            {"data.max_row_tokens": 512},
            "data.max_row_tokens: found 512, allowed: max_position_embeddings",
        ),
        (
            "dpo",
            {"algorithm.reduction": "sequence_mean"},
            "algorithm.reduction: found sequence_mean, allowed with dpo",
        ),
        (
            "dpo",
            {"groups.reference": None},
            "algorithm.name: found dpo, but role reference is in no group",
        ),
        (
            "dpo",
            {"prompts_per_step": 2, "actor.parallel.data": 4},
            "actor.parallel.data: found 4, allowed: at most 2",
        ),
        (
            "grpo",
            {"samples_per_prompt": 1},
            "samples_per_prompt: found 1, allowed with grpo: at least 2",
        ),
        (
            "grpo",
            {"groups.hub.roles": ["advantages", "data"]},
            "groups: found role data with algorithm grpo",
        ),
    ],
)
def test_settings_of_another_algorithm_are_refused_by_name(
    algorithm: str, overrides: dict[str, Any], message: str, tmp_path: Path
) -> None:
    small = {
        "run_dir": str(tmp_path / "run"),
        "data.max_prompt_tokens": 32,
        "rollout.max_new_tokens": 8,
    }
    findings = check(load([], settings(algorithm) | small | overrides))
    assert any(finding.startswith(message) for finding in findings), findings


def test_the_commands_name_the_algorithm(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dpo", "--algorithm.name", "sft"]) == 78
    assert "algorithm.name: found 'sft' with relax-hpc dpo" in capsys.readouterr().err
    task = "relax_hpc.examples.tasks.sort_digits:SortDigits"
    assert main(["sft", "--data.task", task, "--print_config"]) == 0
    assert "name: sft" in capsys.readouterr().out


BASE = {name: SMALL[name] for name in ("seed", "model", "actor", "queue", "liveness")} | {
    "steps": 12,
    "prompts_per_step": 8,
    "checkpoint": {"every": 4},
    "eval": {"every": 4, "samples": 40},
    "actor": {"optimizer": {"lr": 1e-2, "warmup_steps": 2, "clip_grad": 1.0}},
}


def evaluations(run: RunDir, name: str) -> dict[int, float]:
    tag = f"eval/heldout_prompts/{name}"
    return {row["step"]: row[tag] for row in read_metrics(run.root) if tag in row}


@pytest.mark.run
def test_a_killed_run_learns_the_same_as_a_plain_loop_over_the_file(tmp_path: Path) -> None:
    """Losses and final weights are equal bit for bit."""
    overrides = BASE | {
        "algorithm": {"name": "sft"},
        "data": {
            "task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
            "digits": 3,
            "max_row_tokens": 16,
        },
    }
    with running(tmp_path, overrides, {}) as live:
        live.wait_until(lambda: 4 in evaluations(live.run, "loss"), "step 4 evaluated", RUN_S)
        live.kill("actor")
        live.wait_until(lambda: live.incarnations("actor") == 2, "the actor restarts", RUN_S)
        live.kill("data")
        live.finish(RUN_S)
    held_out = evaluations(live.run, "loss")
    assert held_out.keys() == {0, 4, 8, 12} and held_out[12] < 0.7 * held_out[0]
    result = audit(live.run)
    assert not result.problems, result.problems
    expected_losses, expected_weights = plain_loop(live)
    metrics = read_metrics(live.run.root)
    assert [row["loss/policy"] for row in metrics if "loss/policy" in row] == expected_losses
    from safetensors.torch import load_file

    (last,) = live.run.weights.glob("*-v000012")
    weights = load_file(last / "model" / "model.safetensors")
    assert weights.keys() == expected_weights.keys()
    assert all(torch.equal(value, expected_weights[name]) for name, value in weights.items())


def plain_loop(live: Running) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses of all steps and final weights with the run's configuration, in this process without
    queue or roles."""
    config, run = load([live.run.config]), live.run
    source = PromptSource(open_train(run, config, load_tokenizer(run.model)), config)
    torch.set_num_threads(config.threads)
    parallel.initialize_alone("cpu", config.seed, 60.0)
    try:
        model = PolicyModel(
            read_config(run.model), config.model, config.actor.parallel, config.actor
        )
        model.load_hf(run.model)
        trainer = Trainer.from_settings(model, config.algorithm, config.actor, 1.0)
        losses, size = [], config.prompts_per_step
        for step in range(config.steps):
            rows = []
            for ticket in range(step * size, (step + 1) * size):
                rows += rows_of(source.prompt(ticket, 0), ticket, Version(1, 0))
            trainer.accumulate([collate(rows, PAD, "cpu")], last=True)
            metrics = trainer.step(learning_rate(config.actor.optimizer, step, config.steps))
            losses.append(metrics["loss/policy"])
        return losses, model.export_hf()
    finally:
        parallel.destroy()


@pytest.mark.run
def test_a_run_of_pairs_learns_to_prefer_the_chosen_response(tmp_path: Path) -> None:
    """The files are a user's. One line has no rejected response and is skipped."""
    make_tiny_model(tmp_path / "model", TinyModelConfig(**SMALL["model"]["tiny"]), seed=3)
    files = {split: tmp_path / f"{split}.jsonl" for split in ("train", "heldout_prompts")}
    for split, path in files.items():
        rows = [
            *SortDigitPairs().rows(split, DataConfig(digits=3)),
            {"id": "none", "prompt": "1?", "chosen": "1"},
        ]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    evaluated = {"heldout_prompts": str(files["heldout_prompts"])}
    overrides = BASE | {
        "algorithm": {"name": "dpo", "beta": 0.5},
        "model": {"path": str(tmp_path / "model")},
    }
    overrides["data"] = {"train": str(files["train"]), "eval": evaluated, "max_row_tokens": 16}
    with running(tmp_path, overrides, {}) as live:
        live.finish(RUN_S)
    accuracy, rows = evaluations(live.run, "accuracy"), read_metrics(live.run.root)
    assert accuracy[0] == 0.0 and accuracy[12] > 0.65, "every margin is 0 before the first step"
    assert rows[0]["loss/policy"] == pytest.approx(np.log(2)) and rows[11]["loss/policy"] < 0.6
    assert rows[11]["queue/bad_prompt_missing_field"] == 1
    assert not audit(live.run).problems
    tags = [tag for tag in set().union(*rows) if "/" in tag]
    assert all(map(find_declared_tag, tags))
    assert not any(tag.startswith(("reward/", "staleness/")) for tag in tags)


COLOURS = {"r": (250, 20, 20), "g": (20, 250, 20)}


def picture(folder: Path, number: int, colour: str) -> str:
    """Write a picture of one colour, with a shade for each ``number``. Return its name."""
    shade = tuple(max(0, value - 3 * number) for value in COLOURS[colour])
    Image.new("RGB", (64, 64), shade).save(folder / f"{colour}{number}.png")
    return f"{colour}{number}.png"


def picture_rows(folder: Path, numbers: range) -> list[dict[str, Any]]:
    """Rows with a question for the colour of a picture, in both formats."""
    rows: list[dict[str, Any]] = []
    for number, colour in itertools.product(numbers, COLOURS):
        name = picture(folder, number, colour)
        content = [{"type": "image", "image": name}, {"type": "text", "text": "colour?"}]
        rows.append({"messages": [{"role": "user", "content": content}], "answer": colour})
        rows.append({"prompt": "<image>colour?", "image": name, "answer": colour})
    return rows


@pytest.mark.run
def test_demonstrations_with_pictures_are_learned_from_the_pictures(tmp_path: Path) -> None:
    """An answer has two tokens, one of two colours and the end. Without the pictures, its mean loss
    is at least ln(2) / 2."""
    make_tiny_model(tmp_path / "model", TinyModelConfig(vision_layers=2, chat=True), seed=3)
    sets = {"train": range(8), "heldout_prompts": range(8, 11)}
    for split, numbers in sets.items():
        lines = [json.dumps(row) + "\n" for row in picture_rows(tmp_path, numbers)]
        (tmp_path / f"{split}.jsonl").write_text("".join(lines))
    held_out = {"heldout_prompts": str(tmp_path / "heldout_prompts.jsonl")}
    data = {"train": str(tmp_path / "train.jsonl"), "eval": held_out}
    overrides = BASE | {
        "algorithm": {"name": "sft"},
        "model": {"path": str(tmp_path / "model")},
        "data": data | {"chat_template": "model", "max_row_tokens": 64},
        "steps": 24,
        "eval": {"every": 12, "samples": 40},
        "actor": {"optimizer": {"lr": 5e-3, "warmup_steps": 2, "clip_grad": 1.0}},
    }
    with running(tmp_path, overrides, {}) as live:
        live.finish(RUN_S)
    losses = evaluations(live.run, "loss")
    assert losses[24] < 0.6 * np.log(2) / 2, losses
    assert not audit(live.run).problems
    rows = list(queue_rows(live.run).values())
    assert rows and all(row["spans"] and row["media_tokens"] for row in rows)
