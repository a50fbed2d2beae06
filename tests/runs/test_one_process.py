"""examples/one_process.py computes what a run computes at max_staleness 0, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.run_helpers import running, trained_steps
from tests.requirements import requires

requires("torch", "megatron", "transformers")

EXAMPLE = Path(__file__).parents[2] / "examples" / "one_process.py"
STEPS = 3
RUN_S = 240.0
SETTINGS = {
    "steps": STEPS + 1,
    "warm_start": {"steps": 30, "batch_size": 32, "lr": 1e-2},
    "algorithm": {"passes": 2, "mini_batches": 2},
    "actor": {"optimizer": {"warmup_steps": 2, "final_lr_share": 0.1}},
    "weights": {"file_every": 1, "keep_every": 1},
}


def test_it_can_be_read_on_one_screen() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) <= 120 and all(len(line) <= 100 for line in lines)


@pytest.mark.run
def test_its_weights_are_those_of_the_first_steps_of_a_run(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file

    with running(tmp_path, SETTINGS) as live:
        command = [
            sys.executable,
            "-m",
            "relax_hpc.examples.one_process",
            str(tmp_path / "config.yaml"),
        ]
        command += [str(tmp_path / "one"), str(STEPS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S)
        assert done.returncode == 0, done.stderr
        live.finish(RUN_S)
        rows, run = trained_steps(live.run), live.run
    printed = [
        float(line.split()[-1]) for line in done.stdout.splitlines() if line.startswith("step ")
    ]
    assert printed == pytest.approx([row["reward/mean"] for row in rows[:STEPS]], abs=6e-4)
    assert all(row["reward/std"] > 0 for row in rows), "without a signal weights would hardly move"
    files = (run.weights / f"i000001-v{STEPS:06d}" / "model").glob("*.safetensors")
    published = {name: tensor for file in files for name, tensor in load_file(file).items()}
    weights = load_file(tmp_path / "one" / "weights" / "model" / "model.safetensors")
    initial = load_file(tmp_path / "one" / "model" / "model.safetensors")
    assert weights.keys() == published.keys()
    assert [
        name for name, tensor in weights.items() if not torch.equal(tensor, published[name])
    ] == []
    assert any(not torch.equal(tensor, initial[name]) for name, tensor in weights.items())
