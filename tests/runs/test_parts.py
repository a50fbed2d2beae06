"""Runs that only generate, and runs that only train on exported rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relax_hpc.base.errors import EXIT_CONFIG, ConfigError
from relax_hpc.base.versions import Version
from relax_hpc.commands.program import main
from relax_hpc.roles.exported_rows import ExportedRows
from tests.helpers import run_helpers
from tests.helpers.audit import audit
from tests.requirements import requires

pytestmark = pytest.mark.run

requires("megatron")

RUN_S = 240.0
STEPS = 5
GENERATING = run_helpers.merged(
    run_helpers.LIGHT,
    {
        "only": "rollout",
        "max_staleness": 1,
        "steps": STEPS,
        "rollout": {"engine": {"simulated": {"response_s": 0.3}}},
    },
)


def read_rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def rows_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of a run that only generates, whose hub, with the collector, was killed."""
    with run_helpers.running(tmp_path_factory.mktemp("generating"), GENERATING) as running:
        running.wait_for_step(0, RUN_S)
        running.kill("collector")
        running.finish(RUN_S)
        assert running.incarnations("hub") == 2
        result = audit(running.run)
        assert result.problems == [] and result.trained == 16 * STEPS and not result.dropped
        assert not list(running.run.weights.iterdir()) and not running.run.saved()
        return running.run.root / "rows.jsonl"


def test_a_run_that_only_generates_exports_all_rows(rows_file: Path) -> None:
    rows = read_rows(rows_file)
    assert [row["step"] for row in rows] == [number // 16 for number in range(16 * STEPS)]
    assert len({row["row_id"] for row in rows}) == 16 * STEPS
    versions = {version for row in rows for version in row["versions"]}
    assert versions == {"i000001-v000000"}, "nothing was trained"
    assert all(0 <= row["reward"] <= 1 and "response" in row for row in rows)
    assert not {"advantages", "old_logprobs"} & rows[0].keys()


def test_a_run_that_only_trains_takes_the_rows_in_their_order(
    rows_file: Path, tmp_path: Path
) -> None:
    exported = read_rows(rows_file)
    settings = {"only": "train", "rows": str(rows_file)}
    with run_helpers.running(tmp_path, run_helpers.merged(run_helpers.LIGHT, settings)) as running:
        running.finish(RUN_S)
        assert audit(running.run).problems == []
        lines = run_helpers.trained_steps(running.run)
        trained = run_helpers.queue_rows(running.run)
    rewards = [sum(row["reward"] for row in exported[n : n + 16]) / 16 for n in (0, 16, 32)]
    assert [line["reward/mean"] for line in lines] == pytest.approx(rewards)
    keys = ("token_ids", "loss_mask", "rollout_logprobs", "prompt_len")
    assert len(trained) == 48
    for row, (_, trained_row) in zip(exported[:48], sorted(trained.items()), strict=True):
        for key in keys:
            assert row[key] == trained_row[key].tolist(), key
    # Without an engine, the only versions are those that were trained here.
    steps = [Version.decode(int(max(row["token_versions"]))).number for row in trained.values()]
    assert sorted(steps) == [0] * 16 + [1] * 16 + [2] * 16


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["{"], ":1: found no (not a JSON object), allowed: a row of relax-hpc queue export"),
        (['{"step": 0}'], ":1: found no prompt_id, allowed: a row of relax-hpc queue export"),
        ([], ": found 0 prompt groups, allowed: at least 12 (steps * prompts_per_step)"),
    ],
)
def test_bad_files_of_rows(tmp_path: Path, lines: list[str], text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        ExportedRows(path, 12, 4)
    assert text in str(caught.value)


def test_a_file_with_other_prompts_than_the_run_needs(rows_file: Path, tmp_path: Path) -> None:
    path, rows = tmp_path / "rows.jsonl", read_rows(rows_file)
    with pytest.raises(ConfigError, match="found 20 prompt groups, allowed: at least 21"):
        ExportedRows(rows_file, 21, 4)
    with pytest.raises(ConfigError, match=r":1: found 4 episodes of a prompt, allowed: 8"):
        ExportedRows(rows_file, 12, 8).rows(0, 0, Version(1, 0))
    rows[3]["spans"] = [{"kind": "image", "start": 0, "length": 1, "media_id": "a"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(ConfigError, match=r":4: found a row with media, allowed: rows of text"):
        ExportedRows(path, 12, 4)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (["--only", "train"], "rows: found '' with only: train, give a file of rows"),
        (["--only", "train", "--rows", "/no/file"], "rows: found '/no/file', allowed: a file of"),
        (["--rows", "/no/file"], "rows: found '/no/file' without only: train; set it, or"),
        (["--only", "rollout", "--algorithm.name", "sft"], "only: found 'rollout' with algorithm"),
        (["--only", "generate"], "only: found 'generate' (str), allowed: '', 'rollout', 'train'"),
    ],
)
def test_settings_that_do_not_fit(
    settings: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "--config", "quickstart", *settings]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
