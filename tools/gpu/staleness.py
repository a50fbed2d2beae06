"""What a step takes in a mode, when actor and engine take turns, at staleness 0 or at 1: real
engine, real shape.

The model has random weights; what is drawn means nothing, how long it takes does. The runs are
those of the quickstart in `tools/bench/modes.py`, with another model. On one GPU all groups share
it, and staleness 1 gains what is left over.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from child import answer
from shapes import hf_config

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from modes import measured
from quickstart_runs import run

from relax_hpc.base.rundir import RunDir
from relax_hpc.ops.observe.report import report
from relax_hpc.training.models.tiny_tokenizer import BOS_ID, EOS_ID, PAD_ID, write_tokenizer

LAST_LINES = 3


def make_model(directory: Path, shape: str, device: str) -> None:
    """Random weights in bfloat16, and a tokenizer that has a token a character."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoConfig, AutoModelForCausalLM

    about = hf_config(shape) | {
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
    }
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        about["model_type"], **{k: v for k, v in about.items() if k != "model_type"}
    )
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(about | {"torch_dtype": "bfloat16"}))
    write_tokenizer(directory)


def measure(
    device: str,
    mode: str,
    shape: str,
    steps: int,
    prompts: int,
    new_tokens: int,
    kv_tokens: int,
    share: float,
) -> dict[str, float]:
    """Medians of the steps after the first three. ``kv_tokens``: that the engine keeps keys and
    values of; ``share``: of the device's memory that it takes."""
    options = {
        "model.device": device,
        "model.dtype": "bfloat16",
        "warm_start.steps": 0,
        "prompts_per_step": prompts,
        "rollout.max_new_tokens": new_tokens,
        "rollout.groups_per_request": prompts,
        "rollout.engine.flags.max_total_tokens": kv_tokens,
        "rollout.engine.flags.mem_fraction_static": share,
        "rollout.engine.start_timeout_s": 900,
        # Random weights: what they answer is no failure of theirs.
        "rollout.filter": "",
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", shape, device)
        words = [
            f"--{key}={value}" for key, value in {"model.path": folder / "model", **options}.items()
        ]
        try:
            path = run(folder / "run", mode, 0, steps, *words)
        except subprocess.CalledProcessError as error:
            said = (folder / "run.txt").read_text().splitlines()
            raise SystemExit(
                " | ".join([f"exit code {error.returncode}", *said[-LAST_LINES:]])
            ) from None
        line = measured(mode, report(RunDir(path), 3)["pace"])
    return {key: value for key, value in line.items() if key != "mode"}


if __name__ == "__main__":
    answer(measure)
