"""`relax-hpc replay`: comparison of steps, digests of versions, and errors. Whole replays are in
tests/runs/test_reference_loop.py."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.program import main
from relax_hpc.commands.replay import _device_note, _explain_missing_rows, compare_step, plan_replay
from relax_hpc.queue.inspect.trained_steps import TrainingHistory
from relax_hpc.training.weights.manifest import Chunk
from relax_hpc.training.weights.tensors import TensorPart
from relax_hpc.training.weights.version_digests import (
    VERSIONS_FILE,
    DigestLog,
    VersionDigest,
    digest_of_chunks,
    read_digests,
)
from tests.helpers.command_helpers import make_run

OWN = VersionDigest("i000001-v000008", "aa", "GPU A")
VALUES = {"loss/lr": 0.001, "loss/grad_norm": 0.25}


@pytest.mark.parametrize(
    ("recorded", "expected", "text"),
    [
        (
            VALUES,
            replace(OWN, version="i000002-v000008"),
            "step 7: equal: learning rate, gradient norm, bytes of version i000002-v000008",
        ),
        (
            VALUES | {"loss/grad_norm": 0.25000000000000006},
            replace(OWN, digest="bb"),
            "step 7: gradient norm 0.25, in the run 0.25000000000000006; bytes of version "
            "i000002-v000008 differ",
        ),
        (
            {"loss/lr": 0.001},
            None,
            "step 7: equal: learning rate; not recorded: gradient norm, bytes of version "
            "i000002-v000008",
        ),
    ],
)
def test_comparison(recorded: dict[str, Any], expected: VersionDigest | None, text: str) -> None:
    comparison = compare_step(7, VALUES, recorded, OWN, expected, "i000002-v000008")
    assert str(comparison) == text


def test_a_gradient_norm_that_is_not_finite_equals_itself() -> None:
    values = VALUES | {"loss/grad_norm": math.nan}
    assert not compare_step(7, values, values, OWN, OWN, OWN.version).differences
    assert compare_step(7, VALUES, values, OWN, OWN, OWN.version).differences


def test_other_devices_are_named() -> None:
    same = {"v": OWN}
    assert _device_note(same, same) == "" == _device_note({}, same)
    assert _device_note(same, {"v": replace(OWN, device="GPU B")}) == (
        "the run trained on GPU A, this machine has GPU B: bits can differ"
    )


def chunk(name: str = "weights-v1-0", digest: str = "12", stop: int = 4) -> Chunk:
    return Chunk(name, 64, digest, (TensorPart("a.weight", 0, 0, stop, 0),), {"tcp": {"port": 1}})


def test_a_digest_depends_on_bytes_and_parts_only() -> None:
    first = digest_of_chunks([chunk()])
    assert first == digest_of_chunks([replace(chunk("weights-v2-0"), planes={})])
    others = ([chunk(digest="13")], [chunk(stop=3)], [chunk(), chunk()], [])
    assert len({first, *map(digest_of_chunks, others)}) == 5


def test_digests_of_all_incarnations_are_read(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for incarnation in (1, 2):
        run.logs("actor", incarnation).mkdir(parents=True)
        log = DigestLog(run.logs("actor", incarnation) / VERSIONS_FILE, "GPU A")
        log.add(f"i00000{incarnation}-v000001", [chunk()])
    with (run.logs("actor", 1) / VERSIONS_FILE).open("a") as file:
        file.write('[]\n{"version": 3}\n{"version": "i0000')
    digests = read_digests(run, "actor")
    assert list(digests) == ["i000001-v000001", "i000002-v000001"]
    assert digests["i000001-v000001"].digest == digest_of_chunks([chunk()])


def test_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run", "local")
    assert main(["replay", str(tmp_path), "--step", "1"]) == 78
    assert "no run here (config.yaml is missing)" in capsys.readouterr().err
    assert main(["replay", str(run.root)]) == 78
    assert "--step: found nothing, give the step to train again" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--step: found 1, allowed: none, no step was trained"):
        plan_replay(run, "actor", 1)


def test_missing_rows_name_the_settings_that_keep_them(tmp_path: Path) -> None:
    history = SimpleNamespace(
        checkpoints=[{"step": 200}, {"step": 300}], kept_steps=lambda: [298, 299]
    )
    run, gone = RunDir(tmp_path), list(range(200, 298))
    text = _explain_missing_rows(run, cast(TrainingHistory, history), 299, 200, gone)
    assert text == (
        f"{tmp_path}: step 299 would be trained again from step 200 on, but rows of steps 200 to "
        "297 are gone; in the next run, queue.keep_steps of at least 100 keeps them, or "
        "checkpoint.keep_every keeps a checkpoint between steps 298 and 299"
    )
    history.kept_steps = lambda: []
    text = _explain_missing_rows(run, cast(TrainingHistory, history), 299, 200, [*gone, 298, 299])
    assert text.endswith(
        "rows of steps 200 to 299 are gone; in the next run, queue.keep_steps of "
        "at least 100 keeps them"
    )
