"""Prompt files with bad lines, and rewards that fail for some prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from relax_hpc.config.schema import TinyModelConfig
from relax_hpc.training.models.tiny_model import make_tiny_model
from tests.helpers.run_helpers import SMALL

REWARDS = """
import os, threading

def faulty(sample):
    match sample.metadata.get("fault"):
        case "raise":
            raise RuntimeError("no answer to that")
        case "exit":
            os._exit(3)
        case "hang":
            threading.Event().wait()
    return float(len(sample.response_text))

def never(sample):
    return 1 / 0
"""
"""Module `faulty_rewards`. Tests name the lines of `wait()` and of `never`."""
PROMPTS = [
    {"id": f"p{number}", "prompt": f"{number}?", "answer": f"{number}"}
    for number in range(100, 140)
]
BAD_LINES = {
    "broken_json": '{"id": "torn", "prompt": ',
    "empty_prompt": '{"id": "empty", "prompt": " ", "answer": "1"}',
    "over_long": '{"id": "long", "prompt": "0123456789?", "answer": "1"}',
    "duplicate_id": '{"id": "p100", "prompt": "1?", "answer": "1"}',
}
"""Lines of a prompt file by the reason for which they are skipped."""


def make_data(
    directory: Path, extra_lines: Sequence[str] = (), faults: Mapping[int, str] | None = None
) -> dict:
    """Write a tiny model, the prompt file `train.jsonl` and `faulty_rewards.py` to ``directory``.

    The prompt file has `PROMPTS` and then ``extra_lines``. ``faults``: what the reward
    `faulty_rewards:faulty` does, by number of the prompt. Return the settings for these files.
    """
    make_tiny_model(directory / "model", TinyModelConfig(**SMALL["model"]["tiny"]), 3)
    lines = [
        json.dumps(prompt | {"fault": (faults or {}).get(index)})
        for index, prompt in enumerate(PROMPTS)
    ]
    (directory / "train.jsonl").write_text("\n".join([*lines, *extra_lines]) + "\n")
    (directory / "faulty_rewards.py").write_text(REWARDS)
    data = {
        "task": "",
        "train": str(directory / "train.jsonl"),
        "max_prompt_tokens": 8,
        "shuffle": False,
    }
    return {
        "model": {"path": str(directory / "model")},
        "data": data,
        "rollout": {"reward": "answer_partial"},
        # These tests need no reference, and a run starts faster without one.
        "groups": {"reference": None},
    }
