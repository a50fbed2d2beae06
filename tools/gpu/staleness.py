"""Seconds of a training step with a real engine. Engine and actor take turns on the same device, or
run at the same time at staleness 0 or 1.

The model has a real shape and random weights. Its answers have no meaning, but they take as long as
those of a trained model. The runs are those of the quickstart in `tools/bench/modes.py`, with
another model. If there is one GPU, all groups share it.
"""

from __future__ import annotations

import json
import os
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
FLAGS_VARIABLE = "RELAX_ENGINE_FLAGS"


def make_model(directory: Path, shape: str, device: str) -> None:
    """Write a model with random bfloat16 weights, and a tokenizer with one token per character."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoConfig, AutoModelForCausalLM

    description = hf_config(shape)
    description |= {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID}
    settings = {key: value for key, value in description.items() if key != "model_type"}
    torch.manual_seed(0)
    config = AutoConfig.for_model(description["model_type"], **settings)
    with torch.device(device):
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps(description | {"torch_dtype": "bfloat16"}))
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
    """Medians of the steps after the first three.

    ``kv_tokens``: size of the engine's KV cache; ``share``: share of the device's memory that the
    engine may take for weights and KV cache. The environment variable RELAX_ENGINE_FLAGS (JSON)
    replaces flags of SGLang for this machine.
    """
    flags = {"max_total_tokens": kv_tokens, "mem_fraction_static": share}
    if device == "cuda":
        # Capturing graphs of 58 prefill shapes takes a minute on an H100. They do not make decoding
        # faster, which takes most of a step.
        flags["cuda_graph_backend_prefill"] = "disabled"
    flags |= json.loads(os.environ.get(FLAGS_VARIABLE, "{}"))
    options = {
        "model.device": device,
        "model.dtype": "bfloat16",
        "warm_start.steps": 0,
        "prompts_per_step": prompts,
        "rollout.max_new_tokens": new_tokens,
        "rollout.groups_per_request": prompts,
        "rollout.engine.start_timeout_s": 900,
        # Random weights give wrong answers only; the run must not wait for a right one.
        "rollout.filter": "",
    }
    for flag, value in flags.items():
        options[f"rollout.engine.flags.{flag}"] = value
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", shape, device)
        options["model.path"] = folder / "model"
        assignments = [f"--{key}={value}" for key, value in options.items()]
        try:
            path = run(folder / "run", mode, 0, steps, *assignments)
        except subprocess.CalledProcessError as error:
            output = (folder / "run.txt").read_text()
            print(output, file=sys.stderr)
            last_lines = output.splitlines()[-LAST_LINES:]
            raise SystemExit(" | ".join([f"exit code {error.returncode}", *last_lines])) from None
        figures = measured(mode, report(RunDir(path), 3)["pace"])
    return {key: value for key, value in figures.items() if key != "mode"}


if __name__ == "__main__":
    answer(measure)
