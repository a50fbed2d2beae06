"""The comparison with other projects' losses: it sees a difference, and says who is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from relax_hpc.algorithms import Gspo, ReinforcePP
from relax_hpc.algorithms.base import CorrectionConfig

PEERS = Path(__file__).parents[2] / "tools" / "bench" / "peer_losses"


@pytest.fixture
def cases(monkeypatch, bench):
    monkeypatch.syspath_prepend(str(PEERS))
    return bench("cases")


def test_a_difference_is_seen(cases) -> None:
    """In clip and advantages; small log-ratios alone would not show the former."""
    off, drawn = CorrectionConfig(kind="off"), [cases.draw(seed) for seed in range(6)]
    pairs = [
        (
            cases.our_loss(Gspo(correction=off)),
            cases.our_loss(Gspo(correction=off, clip_high=5e-4)),
        ),
        (
            cases.our_advantages(ReinforcePP()),
            cases.our_advantages(ReinforcePP(kl_in_reward=0.001)),
        ),
    ]
    for one, other in pairs:
        assert cases.farthest(cases.Comparison("x", "same", one, one), drawn) == 0.0
        assert cases.farthest(cases.Comparison("x", "other", one, other), drawn) > 1e-6


def test_batches_have_what_decides(cases) -> None:
    drawn = [cases.draw(seed) for seed in range(6)]
    assert any((case.mask != case.whole).any() for case in drawn) and all(
        case.mask.any(1).all() for case in drawn
    )
    assert max(float((case.logprobs - case.old).abs().max()) for case in drawn) > 5
    assert torch.equal(
        drawn[0].rewards[: cases.SAMPLES], torch.ones(cases.SAMPLES, dtype=torch.float64)
    )


def test_a_peer_that_is_not_there_is_said() -> None:
    words = [sys.executable, str(PEERS), "--peers", "slime", "--batches", "1", "--json"]
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=120, env={"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 1, done.stderr
    assert (
        "slime: nothing is compared" in done.stdout
        and "compared with nobody: cispo, distill" in done.stdout
    )
