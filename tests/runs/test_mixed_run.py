"""The run of all media, shortened, by its command: real SGLang and megatron-core, towers that
learn, damaged files."""

from __future__ import annotations

from pathlib import Path
from statistics import mean

import pytest
import yaml
from safetensors.torch import load_file

from relax_hpc.base.rundir import RunDir
from relax_hpc.examples.tasks.mixed_media import PARTS
from relax_hpc.ops.observe.sample_view import SampleFilter, select_samples
from relax_hpc.queue.storage.media import check_media
from tests.effort import effort
from tests.helpers.audit import audit
from tests.helpers.run_helpers import (
    final_weights,
    queue_rows,
    read_metrics,
    running,
    trained_steps,
)
from tests.requirements import requires

requires("sglang", "mpi", "torch", "megatron")

pytestmark = pytest.mark.run

MIXED = Path(__file__).parents[2] / "configs" / "runs" / "mixed.yaml"
LEARNS = bool(effort(0, 1))
"""Whether the run is long enough to learn, as in `env/test.sh --all`."""
STEPS = effort(4, 16)
SHORTER = {
    "steps": STEPS,
    "prompts_per_step": effort(16, 32),
    "data": {"task": "tests.runs.mixed_task:Mixed"},
    # Only a model that is to learn needs to know the answers a little.
    "warm_start": {"steps": effort(4, 60), "batch_size": effort(32, 128)},
    "actor": {"optimizer": {"warmup_steps": 3, "final_lr_share": 1.0}, "parallel": {"data": 2}},
    "queue": {"keep_steps": 1000},
    "checkpoint": {"every": STEPS},
    "liveness": {"start_ahead_s": 0.0},
    "eval": {"every": STEPS, "samples": effort(24, 96)},
}
RUN_S = 900.0
PLACEHOLDERS = {"image": 51, "video": 52, "audio": 55}


def test_a_model_trains_on_images_videos_sounds_and_texts_at_once(tmp_path: Path) -> None:
    with running(tmp_path, SHORTER, yaml.safe_load(MIXED.read_text())) as live:
        live.finish(RUN_S)
    trained, rows = trained_steps(live.run), queue_rows(live.run)
    if LEARNS:
        assert_learned(live.run, [row["reward/mean"] for row in trained])
    # The engine saw and heard what the trainer did.
    assert all(row["parity/logprob_abs_diff"] < 1e-5 for row in trained)
    kinds = [{span["kind"] for span in row["spans"]} for row in rows.values()]
    assert {kind for some in kinds for kind in some} == PLACEHOLDERS.keys() and set() in kinds
    assert all(check_media(row, PLACEHOLDERS) >= 0 for row in rows.values())
    found = audit(live.run)
    assert found.problems == [] and not found.dropped
    assert (
        set(found.failed) <= {"truncated", "corrupted"} and sum(found.failed.values()) >= STEPS // 4
    )

    before, after = load_file(live.run.model / "model.safetensors"), final_weights(live.run)
    assert before.keys() == after.keys()
    for place in ("visual", "audio_tower"):
        tower = [name for name in before if place in name]
        assert (
            len(tower) > 20
            and sum(bool((before[name] != after[name]).any()) for name in tower) > len(tower) * 0.9
        )
    samples = select_samples(live.run, SampleFilter(eval_set=None, limit=0)).samples
    shown = [medium for one in samples for medium in one.get("media", ())]
    assert {medium["kind"] for medium in shown} == PLACEHOLDERS.keys()
    assert all(medium["picture"].startswith("data:image/jpeg;base64,") for medium in shown)


def assert_learned(run: RunDir, rewards: list[float]) -> None:
    """The reward rises, and answers depend on the media of their own row."""
    # By 0.05 at a rate that fell off; means of as many steps spread by 0.02.
    assert mean(rewards[STEPS // 2 :]) > mean(rewards[:4]), rewards
    last = read_metrics(run.root)[-1]
    right = {name: last[f"eval/{name}/answer_exact"] for name in (*PARTS, "exchanged")}
    # With the media of another row a question is answered by chance, which is a quarter.
    assert right["exchanged"] < 0.4
    with_media = mean(right[name] for name in ("images", "videos", "sounds"))
    assert with_media > right["exchanged"] + 0.05, right
