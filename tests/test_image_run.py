"""The run of images, shortened, by its command: real SGLang and megatron-core, a tower that learns, damaged images."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import yaml
from safetensors.torch import load_file

from relax_hpc.observe.sample_view import Wanted, find
from relax_hpc.transfer_queue.storage.media import check_media
from tests.audit import audit
from tests.requirements import requires
from tests.run_helpers import final_weights, queue_rows, read_metrics, running, trained_steps

requires("sglang", "mpi", "torch", "megatron")

pytestmark = pytest.mark.run

IMAGE = Path(__file__).parents[1] / "configs" / "runs" / "image.yaml"
STEPS = 24
SHORTER = {
    "steps": STEPS,
    "data": {"task": "tests.shapes_task:Shapes"},
    "actor": {"optimizer": {"warmup_steps": 3}, "parallel": {"data": 2}},
    "queue": {"keep_steps": 1000},
    "checkpoint": {"every": STEPS},
    "eval": {"every": STEPS, "samples": 96},
}
RUN_S = 900.0
PLACEHOLDER = {"image": 51}


def test_a_model_that_sees_learns_from_images(tmp_path: Path) -> None:
    with running(tmp_path, SHORTER, yaml.safe_load(IMAGE.read_text())) as live:
        live.finish(RUN_S)
    trained, rows = trained_steps(live.run), queue_rows(live.run)
    rewards = [row["reward/mean"] for row in trained]
    # Of four runs by 0.06 to 0.12; a step's mean spreads by 0.03.
    assert mean(rewards[STEPS // 2 :]) > mean(rewards[:3]) + 0.03, rewards
    # The engine saw what the trainer saw.
    assert all(row["parity/logprob_abs_diff"] < 1e-5 for row in trained)
    # By the image of another row its question is answered by chance, which is a quarter.
    last = read_metrics(live.run.root)[-1]
    assert last["eval/exchanged/answer_exact"] < 0.4
    assert last["eval/heldout/answer_exact"] > last["eval/exchanged/answer_exact"] + 0.08

    assert len({row["spans"][0]["media_id"] for row in rows.values()}) <= len(rows) // 8
    assert all(check_media(row, PLACEHOLDER) == 4 for row in rows.values())
    found = audit(live.run)
    assert found.problems == [] and not found.dropped
    assert set(found.failed) <= {"truncated", "corrupted"} and sum(found.failed.values()) > STEPS // 2

    before, after = load_file(live.run.model / "model.safetensors"), final_weights(live.run)
    tower = [name for name in before if "visual" in name]
    assert before.keys() == after.keys() and len(tower) > 20
    assert sum(bool((before[name] != after[name]).any()) for name in tower) > len(tower) * 0.9
    samples = find(live.run, Wanted(of=None, limit=0)).samples
    assert all(one["media"][0]["picture"].startswith("data:image/jpeg;base64,") for one in samples)
