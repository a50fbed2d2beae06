"""A process computes on the device that it was asked to use, whatever it could see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.requirements import requires

pytestmark = pytest.mark.run

BESIDE_A_GPU = """
import sys
from pathlib import Path
import torch

torch.cuda.is_available, torch.cuda.device_count = lambda: True, lambda: 1

from relax_hpc.config.schema import Config, WarmStartConfig
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.warm_start import warm_start

config, at = Config(seed=3, warm_start=WarmStartConfig(steps=2, batch_size=2)), Path(sys.argv[1])
make_tiny_model(at / "init", config.model.tiny, seed=3)
print(warm_start(config, at / "init", at / "demonstrations.jsonl", at / "trained"))
"""


def test_a_policy_on_the_cpu_needs_no_gpu_hidden(tmp_path: Path) -> None:
    """megatron-core asks torch for the current CUDA device otherwise, wherever torch says that
    there is one."""
    requires("torch", "megatron")
    lines = [{"token_ids": [1, 5 + index, 20, 5 + index, 2], "prompt_len": 3} for index in range(4)]
    (tmp_path / "demonstrations.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    command = [sys.executable, "-c", BESIDE_A_GPU, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "trained/model.safetensors").exists()


def test_tests_see_no_gpu_unless_they_are_asked_to_use_one() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
