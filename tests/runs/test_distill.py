"""On-policy distillation: its gradients are those of the divergences, and runs whose teacher is
another model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.algorithms import Distill, Grpo
from relax_hpc.algorithms.base import CorrectionConfig, OverlongConfig
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.ops.checks.model_files import spec_at
from relax_hpc.ops.checks.settings import check
from relax_hpc.ops.plan.plan import own_spec
from relax_hpc.queue.plan import Plan
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.audit import audit
from tests.helpers.run_helpers import LIGHT, merged, queue_rows, running, trained_steps
from tests.requirements import requires

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

WAIT_S = 120.0
TINY = TinyModelConfig(hidden_size=48, num_layers=2, head_dim=16, intermediate_size=64)


def test_its_gradient_is_that_of_the_divergence_from_the_teacher() -> None:
    """Exact sums over a categorical, on-policy: it is that of KL(policy || teacher), and not that
    of the reverse."""
    teacher = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logits = torch.tensor([0.1, 0.9, -0.3], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    drawn = policy.detach()
    (exact,) = torch.autograd.grad(
        (policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True
    )
    (other,) = torch.autograd.grad(
        (teacher.exp() * (teacher - policy)).sum(), logits, retain_graph=True
    )
    algorithm, total = (
        Distill(correction=CorrectionConfig(kind="off")),
        torch.zeros((), dtype=torch.float64),
    )
    for token in range(3):
        row = {"reward": 0.0, "loss_mask": np.array([1])}
        row |= {
            "teacher_logprobs": teacher[None, token].numpy(),
            "rollout_logprobs": drawn[None, token].numpy(),
        }
        advantage = algorithm.token_advantages([[[row], [row]]])[0]
        one = {
            name: value[None, None, token]
            for name, value in (("logprobs", policy), ("old_logprobs", drawn))
        }
        one |= {
            "rollout_logprobs": drawn[None, None, token],
            "advantages": torch.tensor(advantage)[None].double(),
        }
        batch = TokenBatch(
            **one, teacher_logprobs=teacher[None, None, token], mask=torch.ones(1, 1).double()
        )
        loss, metrics = algorithm.loss(batch)
        assert metrics["algorithm/teacher_kl"].item() == pytest.approx(
            float(drawn[token] - teacher[token])
        )
        total = total + drawn[token].exp() * loss
    (found,) = torch.autograd.grad(total, logits)
    assert torch.allclose(found, exact, atol=1e-6) and (exact - other).norm() > 0.1 * exact.norm()


FORMS = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.5), ("jsd", 0.1)]
VOCAB = 7


def by_numpy(p: np.ndarray, q: np.ndarray, divergence: str, beta: float) -> float:
    """Of teacher ``p`` and policy ``q``, probabilities [events]."""

    def kl(a: np.ndarray, b: np.ndarray) -> float:
        return float(sum(x * np.log(x / y) for x, y in zip(a, b, strict=True)))

    m = beta * p + (1 - beta) * q
    return {
        "reverse": kl(q, p),
        "forward": kl(p, q),
        "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m),
    }[divergence]


def likeliest(logits: torch.Tensor, teacher: torch.Tensor, count: int) -> dict[str, torch.Tensor]:
    """What of a policy's logits [b, s, v] and a teacher's distribution a batch has, of the
    teacher's likeliest."""
    policy, top = logits.log_softmax(-1), teacher.log().topk(count, -1)
    first = {
        name: policy[..., 0].detach() for name in ("old_logprobs", "rollout_logprobs", "advantages")
    }
    first |= {"logprobs": policy[..., 0], "likeliest": policy.gather(-1, top.indices)}
    return first | {"teacher_top_logprobs": top.values, "teacher_top_ids": top.indices.int()}


def loss_of(
    logits: torch.Tensor, teacher: torch.Tensor, count: int, mask: torch.Tensor, **settings
) -> tuple:
    algorithm = Distill(teacher_top_k=count, **settings)
    batch = TokenBatch(**likeliest(logits, teacher, count), mask=mask).replace(advantages=0 * mask)
    return algorithm.loss(batch)


@pytest.mark.parametrize("count", [1, 3, VOCAB])
@pytest.mark.parametrize(("divergence", "beta"), FORMS)
def test_divergences_over_the_likeliest_tokens_and_the_rest(
    divergence: str, beta: float, count: int
) -> None:
    """Values as of a loop over events, summed over trained tokens; gradients by finite differences,
    by the logits."""
    generator = torch.Generator().manual_seed(count)
    logits = torch.randn(2, 3, VOCAB, generator=generator, dtype=torch.float64).requires_grad_()
    teacher = (2 * torch.randn(2, 3, VOCAB, generator=generator, dtype=torch.float64)).softmax(-1)
    mask = torch.tensor([[0, 1, 1], [1, 0, 0]], dtype=torch.float64)
    about = {"divergence": divergence, "beta": beta}
    loss, metrics = loss_of(logits, teacher, count, mask, **about)
    expected = 0.0
    for p, q in zip(
        teacher[mask > 0].numpy(), logits.softmax(-1)[mask > 0].detach().numpy(), strict=True
    ):
        top, others = np.argsort(p)[::-1][:count], np.argsort(p)[::-1][count:]
        coarse = [np.append(x[top], x[others].sum()) if len(others) else x[top] for x in (p, q)]
        expected += by_numpy(*coarse, divergence, beta)
    # Of all tokens nothing is left, where a millionth stands.
    assert loss.item() == pytest.approx(expected, abs=1e-9 if count < VOCAB else 1e-5)
    assert metrics["algorithm/teacher_divergence"] == metrics["loss/divergence"] == loss.detach()
    assert torch.autograd.gradcheck(
        lambda x: loss_of(x, teacher, count, mask, **about)[0], (logits,), atol=1e-6
    )
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient[mask == 0].any()


def test_of_all_tokens_gradients_are_the_known_ones_and_a_correction_weighs_nothing() -> None:
    """By the logits: policy - teacher of the forward one, policy * (log(policy / teacher) - KL) of
    the reverse."""
    logits = torch.tensor([[[0.1, 0.9, -0.3, 0.4]]], dtype=torch.float64, requires_grad=True)
    teacher = torch.tensor([[[0.1, 0.2, 0.3, 0.4]]], dtype=torch.float64)
    policy, one = logits.softmax(-1).detach(), torch.ones(1, 1, dtype=torch.float64)
    ratio = (policy / teacher).log()
    known = {"forward": policy - teacher, "reverse": policy * (ratio - (policy * ratio).sum())}
    for divergence, expected in known.items():
        algorithm = Distill(teacher_top_k=4, divergence=divergence)
        batch = TokenBatch(**likeliest(logits, teacher, 4), mask=one)
        # Another policy has drawn it, and there was no reward.
        batch = batch.replace(rollout_logprobs=batch.rollout_logprobs - 3, advantages=0 * one)
        loss, metrics = algorithm.loss(batch)
        (gradient,) = torch.autograd.grad(loss, logits, retain_graph=True)
        torch.testing.assert_close(gradient, expected, atol=1e-5, rtol=0)
        assert metrics["correction_weight"] != 1 and metrics["algorithm/teacher_rest"] < 2e-6
    # The ends of the family between them.
    for beta, divergence in ((1e-6, "forward"), (1 - 1e-6, "reverse")):
        end = loss_of(logits, teacher, 4, one, divergence=divergence)[0]
        near = loss_of(logits, teacher, 4, one, divergence="jsd", beta=beta)[0] / min(
            beta, 1 - beta
        )
        assert near.item() == pytest.approx(end.item(), rel=1e-4)


@given(seed=st.integers(0, 2**32 - 1), count=st.integers(1, VOCAB - 1), form=st.sampled_from(FORMS))
def test_what_is_not_told_never_adds_to_a_divergence(
    seed: int, count: int, form: tuple[str, float]
) -> None:
    """It is at least 0, at most that of all tokens, and 0 for a policy that is the teacher."""
    generator = torch.Generator().manual_seed(seed)
    logits, other = 3 * torch.randn(2, 1, 1, VOCAB, generator=generator, dtype=torch.float64)
    mask, (divergence, beta) = torch.ones(1, 1, dtype=torch.float64), form
    some, more, none = (
        loss_of(policy, other.softmax(-1), k, mask, divergence=divergence, beta=beta)[0].item()
        for policy, k in ((logits, count), (logits, VOCAB), (other, count))
    )
    assert -1e-9 <= some <= more + 1e-5 and none == pytest.approx(0, abs=1e-9)


def test_forms_that_make_no_sense_are_refused_and_no_advantages_wait_for_a_teacher() -> None:
    for settings, said in (
        ({"divergence": "forward"}, "divergence: found forward with teacher_top_k 0"),
        (
            {"divergence": "jsd", "teacher_top_k": 4, "beta": 1.0},
            "beta: found 1 with divergence jsd",
        ),
    ):
        (finding,) = Distill(**settings).findings()
        assert finding.startswith(said)
    form = Distill(divergence="forward", teacher_top_k=16)
    assert not [*form.findings()] and form.needs == ("reward",) and not form.uses_old
    assert form.loss_needs(stale=True) == ("advantages", "teacher_top_ids", "teacher_top_logprobs")
    assert "old_logprobs" in Distill(teacher_top_k=16, reward_weight=0.5, passes=2).loss_needs()
    assert "teacher_logprobs" in Distill().needs and Distill().loss_needs() == ("advantages",)
    one = torch.zeros(1, 1)
    with pytest.raises(
        ValueError, match="teacher_top_k is set but the batch has no likeliest tokens"
    ):
        form.loss(
            TokenBatch(
                logprobs=one, old_logprobs=one, rollout_logprobs=one, advantages=one, mask=one + 1
            )
        )


def test_rewards_are_added_by_their_weight_and_far_tokens_are_bounded() -> None:
    def row(reward: float, far: float) -> dict:
        return {
            "reward": reward,
            "loss_mask": np.array([0, 1, 1], np.uint8),
            "rollout_logprobs": np.array([0, -1, -2], np.float32),
            "teacher_logprobs": np.array([-9, -1.5, -2 + far], np.float32),
        }

    prompts = [[[row(0.0, 0.25)], [row(1.0, -30.0)]]]
    first, second = Distill(teacher_cap=5.0).token_advantages(prompts)
    assert first.tolist() == [0, -0.5, 0.25] and second.tolist() == [0, -0.5, -5.0]
    by_reward = Grpo().token_advantages(prompts)
    both = Distill(reward_weight=2.0, teacher_cap=0.0).token_advantages(prompts)
    assert both[1] == pytest.approx(2 * by_reward[1] + np.array([0, -0.5, -30.0]))
    unused = {
        "shuffle_rewards": True,
        "kl_in_reward": 0.1,
        "overlong": OverlongConfig(max_tokens=4),
    }
    findings = [finding.partition(":")[0] for finding in Distill(**unused).findings()]
    assert findings == ["shuffle_rewards", "kl_in_reward", "overlong.max_tokens"], (
        "no reward is learned from"
    )
    assert not [*Distill(**unused, reward_weight=1.0).findings()]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_teacher_is_needed_and_it_or_a_critic_has_to_read_what_the_policy_writes(
    tmp_path: Path,
) -> None:
    policy, teacher = tmp_path / "policy", tmp_path / "teacher"
    for directory in (policy, teacher):
        make_tiny_model(directory, TINY, seed=1)
    run = {
        "run_dir": str(tmp_path / "run"),
        "data.task": "relax_hpc.examples.tasks.sort_digits:SortDigits",
        "data.max_prompt_tokens": 32,
    }
    run |= {"rollout.max_new_tokens": 5, "algorithm.name": "distill", "model.path": str(policy)}
    config = load([], run | {"model.teacher_path": str(teacher)})
    assert check(config) == [] and config.groups["teacher"].roles == ["teacher"]
    assert Plan.from_config(config).tasks["advantages"].needs == (
        "reward",
        "rollout_logprobs",
        "teacher_logprobs",
    )
    assert own_spec(config, "teacher", spec_at(config.model)).hidden == 48
    (finding,) = check(load([], run))
    assert finding.startswith("model.teacher_path: found nothing with role teacher")
    (finding,) = check(
        load([], run | {"model.teacher_path": str(teacher), "algorithm.name": "grpo"})
    )
    assert "and no algorithm that needs it" in finding
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"7"', '"seven"'))
    (finding,) = check(load([], run | {"model.teacher_path": str(teacher)}))
    assert (
        finding.startswith("model.teacher_path: found")
        and "has other ids than the policy's" in finding
    )
    (finding,) = check(load([], run | {"model.critic_path": str(teacher), "algorithm.name": "ppo"}))
    assert (
        finding.startswith("model.critic_path: found")
        and "has other ids than the policy's" in finding
    )
    top = {"model.teacher_path": str(policy), "algorithm.teacher_top_k": 1000}
    (finding,) = check(load([], run | top))
    assert finding.startswith("algorithm.teacher_top_k: found 1000, allowed: at most 64")
    config = load([], run | {"model.teacher_path": str(policy), "teacher.parallel.tensor": 3})
    assert any(one.startswith("teacher.parallel.tensor: found 3") for one in check(config))


@pytest.mark.parametrize(
    "form", [{}, {"divergence": "forward", "teacher_top_k": 3}], ids=["drawn", "likeliest"]
)
def test_a_run_learns_from_a_teacher_of_another_size(form: dict, tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "teacher", TINY, seed=1)
    over = {
        "steps": 4,
        "model": {"teacher_path": str(tmp_path / "teacher")},
        "algorithm": {"name": "distill"} | form,
    }
    with running(tmp_path, merged(LIGHT, over | {"actor": {"forward": []}})) as live:
        if form:
            live.wait_for_step(0, WAIT_S)
            live.kill("teacher")
        live.finish(WAIT_S)
    steps = trained_steps(live.run)
    assert [row["step"] for row in steps] == [0, 1, 2, 3] and all(
        row["algorithm/teacher_kl"] for row in steps
    )
    assert audit(live.run).problems == []
    if form:
        assert live.incarnations("teacher") == 2
        # Who waited for scores says for whom.
        causes = {
            line.get("peer")
            for path in live.run.logs("actor", 1).glob("spans-*.jsonl")
            for line in lines(path)
        }
        assert "teacher" in causes
        # Of 64 tokens the best three of a model of random weights have little.
        assert all(
            0.5 < row["algorithm/teacher_rest"] < 1 and row["loss/divergence"] > 0 for row in steps
        )
        row = next(iter(queue_rows(live.run).values()))
        ids, logprobs = row["teacher_top_ids"], row["teacher_top_logprobs"]
        assert ids.dtype == np.int32 and ids.shape == logprobs.shape == (len(row["token_ids"]), 3)
        trained = row["loss_mask"] > 0
        assert (
            (np.diff(logprobs[trained]) <= 0).all()
            and not ids[~trained].any()
            and (ids[trained] < 64).all()
        )
