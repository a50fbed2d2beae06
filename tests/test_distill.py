"""On-policy distillation: its gradient is that of the reverse KL, and a run whose teacher is another model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from relax_hpc.algorithms import Distill, Grpo
from relax_hpc.algorithms.base import CorrectionConfig
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.checks.settings import check
from relax_hpc.config import load
from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.data.tiny_model import make_tiny_model
from relax_hpc.plan.plan import teacher_of
from relax_hpc.transfer_queue.plan import Plan
from tests.audit import audit
from tests.requirements import requires
from tests.run_helpers import LIGHT, merged, running, trained_steps

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

WAIT_S = 120.0
TINY = TinyModelConfig(hidden_size=48, num_layers=2, head_dim=16, intermediate_size=64)


def test_its_gradient_is_that_of_the_divergence_from_the_teacher() -> None:
    """Exact sums over a categorical, on-policy: it is that of KL(policy || teacher), and not that of the reverse."""
    teacher = torch.tensor([0.2, 0.2, 0.6], dtype=torch.float64).log()
    logits = torch.tensor([0.1, 0.9, -0.3], dtype=torch.float64, requires_grad=True)
    policy = logits.log_softmax(0)
    drawn = policy.detach()
    (exact,) = torch.autograd.grad((policy.exp() * (policy - teacher)).sum(), logits, retain_graph=True)
    (other,) = torch.autograd.grad((teacher.exp() * (teacher - policy)).sum(), logits, retain_graph=True)
    algorithm, total = Distill(correction=CorrectionConfig(kind="off")), torch.zeros((), dtype=torch.float64)
    for token in range(3):
        row = {"reward": 0.0, "loss_mask": np.array([1])}
        row |= {"teacher_logprobs": teacher[None, token].numpy(), "rollout_logprobs": drawn[None, token].numpy()}
        advantage = algorithm.token_advantages([[[row], [row]]])[0]
        one = {name: value[None, None, token] for name, value in (("logprobs", policy), ("old_logprobs", drawn))}
        one |= {"rollout_logprobs": drawn[None, None, token], "advantages": torch.tensor(advantage)[None].double()}
        batch = TokenBatch(**one, teacher_logprobs=teacher[None, None, token], mask=torch.ones(1, 1).double())
        loss, metrics = algorithm.loss(batch)
        assert metrics["algorithm/teacher_kl"].item() == pytest.approx(float(drawn[token] - teacher[token]))
        total = total + drawn[token].exp() * loss
    (found,) = torch.autograd.grad(total, logits)
    assert torch.allclose(found, exact, atol=1e-6) and (exact - other).norm() > 0.1 * exact.norm()


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
    (finding,) = Distill(shuffle_rewards=True).findings()
    assert finding.startswith("shuffle_rewards: found true with reward_weight 0")


def test_a_teacher_is_needed_and_has_to_read_what_the_policy_writes(tmp_path: Path) -> None:
    policy, teacher = tmp_path / "policy", tmp_path / "teacher"
    for directory in (policy, teacher):
        make_tiny_model(directory, TINY, seed=1)
    run = {"run_dir": str(tmp_path / "run"), "data.task": "sort_digits", "data.max_prompt_tokens": 32}
    run |= {"rollout.max_new_tokens": 5, "algorithm.name": "distill", "model.path": str(policy)}
    config = load([], run | {"model.teacher_path": str(teacher)})
    assert check(config) == [] and config.groups["teacher"].roles == ["teacher"]
    assert Plan.of(config).tasks["advantages"].needs == ("reward", "rollout_logprobs", "teacher_logprobs")
    assert teacher_of(config).hidden == 48
    (finding,) = check(load([], run))
    assert finding.startswith("model.teacher_path: found a role teacher and no directory")
    (finding,) = check(load([], run | {"model.teacher_path": str(teacher), "algorithm.name": "grpo"}))
    assert finding.endswith("and no algorithm that needs it")
    text = (teacher / "tokenizer.json").read_text()
    (teacher / "tokenizer.json").write_text(text.replace('"7"', '"seven"'))
    (finding,) = check(load([], run | {"model.teacher_path": str(teacher)}))
    assert finding.startswith("model.teacher_path: found") and "gives other ids than the policy's" in finding
    config = load([], run | {"model.teacher_path": str(policy), "teacher.parallel.tensor": 3})
    assert any(one.startswith("teacher.parallel.tensor: found 3") for one in check(config))


def test_a_run_learns_from_a_teacher_of_another_size(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "teacher", TINY, seed=1)
    over = {"steps": 3, "model": {"teacher_path": str(tmp_path / "teacher")}, "algorithm": {"name": "distill"}}
    with running(tmp_path, merged(LIGHT, over | {"actor": {"forward": []}})) as live:
        live.finish(WAIT_S)
    steps = trained_steps(live.run)
    assert [row["step"] for row in steps] == [0, 1, 2] and all(row["algorithm/teacher_kl"] for row in steps)
    assert audit(live.run).problems == []
