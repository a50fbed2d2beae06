"""At max_staleness 0, five roles give the same results as one synchronous loop, bit for bit, even if
they are killed and restarted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from relax_hpc.base.errors import EXIT_CONFIG
from relax_hpc.base.metrics.read_spans import read_spans
from relax_hpc.base.rundir import RunDir
from relax_hpc.commands.program import main
from relax_hpc.queue.inspect.export import KeptRows
from relax_hpc.queue.row_ids import parse_row_id
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage import record_file
from tests.effort import effort
from tests.helpers import run_helpers
from tests.helpers.audit import audit
from tests.helpers.run_helpers import Running
from tests.requirements import requires
from tests.runs import late_news

pytestmark = pytest.mark.run

if TYPE_CHECKING:
    from torch import Tensor

requires("megatron", "transformers")

RUN_S = 240.0
# A prompt group has at most 40 tokens. About three groups fit into a window of the actor or of
# actor_fwd, and actor and reference split a group. The last bits of losses and weights depend on
# which samples share a micro-batch.
PLAIN = {
    "warm_start": {"steps": 30, "batch_size": 32, "lr": 1e-2},
    "algorithm": {"passes": 2, "log_entropy": True},
    "actor": {"max_tokens_per_micro_batch": 30},
    "actor_fwd": {"max_tokens_per_micro_batch": 130},
    "reference": {"max_tokens_per_micro_batch": 30},
    "groups": {"reference": {}},
}
# Two mini-batches of two windows each.
REGULARISED = run_helpers.merged(
    PLAIN,
    {
        "seed": 4,
        "steps": 6,
        "algorithm": {"mini_batches": 2, "kl": {"coefficient": 0.05}, "entropy_coefficient": 0.01},
        "actor": {
            "max_tokens_per_micro_batch": 20,
            "balance_window": 2,
            "optimizer": {"final_lr_share": 0.1, "warmup_steps": 2, "weight_decay": 0.01},
        },
        "checkpoint": {"every": 2},
    },
)
INSIDE = {
    "actor": {"forward": ["actor_fwd", "reference"]},
    "groups": {"actor_fwd": None, "reference": None},
}
"""The actor scores too, so two processes fewer import torch."""
EXACT = ("token_ids", "prompt_len", "loss_mask", "rollout_logprobs", "old_logprobs", "ref_logprobs")
EXACT += ("reward", "advantages", "prompt_id", "finish_reason")
METRICS = {
    "reward/mean": "reward",
    "loss/policy": "loss/policy",
    "loss/kl": "loss/kl",
    "loss/entropy": "loss/entropy",
    "loss/ratio": "ratio",
    "loss/grad_norm": "grad_norm",
    "loss/entropy_nats": "entropy",
    "kl/old": "kl/old",
    "kl/reference": "kl/reference",
}
"""Name in the line of the reference, by the tag in metrics.jsonl."""


@dataclass(slots=True)
class Outcome:
    """Results of a run or of the reference."""

    lines: list[dict[str, Any]]
    """Metrics of each step."""
    rows: dict[str, Row]
    weights: dict[str, Tensor]


class References:
    """A process with the reference loop, which makes several runs one after the other, because its
    start takes most of its time."""

    def __init__(self, errors: Path) -> None:
        self.errors, self.script = errors, Path(__file__).with_name("reference_loop.py")
        with errors.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(self.script), "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )

    def start_run(self, directory: Path, overrides: dict[str, Any]) -> Callable[[], Outcome]:
        """Start a reference run. Return a function that waits for its outcome."""
        config = run_helpers.write_config(directory / "reference.yaml", overrides)
        root = directory / "reference"
        self.process.stdin.write(f"{config} {root}\n")
        self.process.stdin.flush()
        return partial(self._outcome, root)

    def _outcome(self, root: Path) -> Outcome:
        from safetensors.torch import load_file

        lines: list[dict[str, Any]] = []
        while True:
            line = self.process.stdout.readline().rstrip()
            if line == str(root):
                break
            assert line, self.errors.read_text()
            if line.startswith("{"):
                lines.append(json.loads(line))
            else:
                # The end of a run that a failed test has not waited for.
                lines.clear()
        return Outcome(
            lines, record_file.read(root / "rows.shard"), load_file(root / "weights.safetensors")
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=RUN_S)


@contextmanager
def reference(directory: Path, overrides: dict[str, Any]) -> Iterator[Callable[[], Outcome]]:
    """Start one reference run. Yield a function that waits for its outcome."""
    references = References(directory / "errors.txt")
    try:
        yield references.start_run(directory, overrides)
    finally:
        references.end()


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """Let runs and the reference import the modules of these tests that a configuration names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    references = References(tmp_path_factory.mktemp("references") / "errors.txt")
    yield references
    references.end()


def await_outcome(running: Running) -> Outcome:
    """Wait for the end of the run and read its results."""
    running.finish(RUN_S)
    run = running.run
    return Outcome(
        run_helpers.trained_steps(run), run_helpers.queue_rows(run), run_helpers.final_weights(run)
    )


def assert_equal(outcome: Outcome, expected: Outcome) -> None:
    """Compare rows, then losses by step, then weights, so that the first difference is close to its
    cause."""
    assert outcome.rows.keys() == expected.rows.keys()
    for name, row in expected.rows.items():
        for field in EXACT:
            assert np.array_equal(outcome.rows[name][field], row[field]), f"{field} of {name}"
    assert len(outcome.lines) == len(expected.lines)
    for line, expected_line in zip(outcome.lines, expected.lines, strict=True):
        assert {tag: line[tag] for tag in METRICS} == renamed_metrics(expected_line)
    assert different_weights(outcome, expected) == []


def renamed_metrics(reference_line: dict[str, Any]) -> dict[str, float]:
    """Metrics of the reference by the tags of a run."""
    return {tag: reference_line[name] for tag, name in METRICS.items()}


def different_weights(outcome: Outcome, expected: Outcome) -> list[str]:
    """Names of weights that are not equal bit for bit."""
    import torch

    assert outcome.weights.keys() == expected.weights.keys()
    pairs = {name: (value, expected.weights[name]) for name, value in outcome.weights.items()}
    return [name for name, pair in pairs.items() if not torch.equal(*pair)]


@pytest.fixture(scope="module")
def plain(
    references: References, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Outcome, Path]:
    """Outcomes of a run whose actor_fwd receives versions late, and of its reference; and the model
    with which both start."""
    directory = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in late_news.environment(directory / "hook").items():
            patch.setenv(name, value)
        await_reference = references.start_run(directory, PLAIN)
        with run_helpers.running(directory, PLAIN) as running:
            outcome, expected = await_outcome(running), await_reference()
    (log,) = running.run.logs("actor_fwd", 1).glob("actor_fwd-rank-0.log")
    late = [line for line in log.read_text().splitlines() if line.startswith(late_news.SAID)]
    assert late == [f"{late_news.SAID} {step}" for step in (1, 2)], "in each step that can be late"
    return outcome, expected, running.run.model


def test_a_run_equals_the_synchronous_loop(plain):
    outcome, expected, _ = plain
    assert len(outcome.rows) == 48 and len(outcome.lines) == 3
    # Equal rewards would hardly change the weights.
    assert all(line["reward/std"] > 0 for line in outcome.lines)
    assert_equal(outcome, expected)


def assert_replay_is_equal(run: RunDir, step: int, capsys: pytest.CaptureFixture[str]) -> str:
    """Replay ``step``. Return the first line of the output, which names the start."""
    before = sorted(path for path in run.root.rglob("*"))
    capsys.readouterr()
    code = main(["replay", str(run.root), "--step", str(step)])
    first, *lines, last = capsys.readouterr().out.splitlines()
    assert code == 0 and last == f"equal: {len(lines)} steps", (first, lines, last)
    for line in lines:
        assert "equal: learning rate, gradient norm, bytes of version i00000" in line
        assert "not recorded" not in line
    assert lines[-1].startswith(f"step {step}: ")
    assert sorted(path for path in run.root.rglob("*")) == before, "nothing is written"
    return first


@pytest.mark.skipif(not effort(0, 1), reason="test_forward_roles_in_the_actor replays too")
def test_a_replay_equals_the_run(plain, capsys):
    """Several windows a step, two passes, and log-probabilities of a separate actor_fwd."""
    run = RunDir(plain[2].parent)
    first = assert_replay_is_equal(run, 2, capsys)
    assert first == f"{run.root}: from version 0, training steps 0 to 2"
    assert main(["replay", str(run.root), "--step", "3"]) == EXIT_CONFIG
    assert "--step: found 3, allowed: 0 to 2" in capsys.readouterr().err


@pytest.mark.skipif(not effort(0, 1), reason="tests/runs/test_parts.py trains on exported rows")
def test_training_on_exported_rows_equals_the_run(plain, tmp_path):
    _, expected, model = plain
    rows = tmp_path / "rows.jsonl"
    command = ["queue", "export", str(model.parent), "--steps", "0-2", "--output", str(rows)]
    assert main(command) == 0
    settings = {
        "only": "train",
        "rows": str(rows),
        "model": {"path": str(model)},
        "warm_start": {"steps": 0},
    }
    with run_helpers.running(tmp_path, run_helpers.merged(PLAIN, settings)) as running:
        assert_equal(await_outcome(running), expected)


def test_two_data_ranks_train_as_one_on_episodes_that_were_cut_into_rows(
    references, plain, tmp_path, capsys
):
    """Each rank trains its share of every window while the next rows are generated, so only the
    order of sums differs. The rows of an episode may be on both ranks and in several micro-batches.
    Together they have the weight of one row."""
    import torch

    overrides = {
        "steps": 1,
        "actor": {"balance_window": 1},
        "algorithm": {"reduction": "sequence_mean"},
    }
    one_rank = with_model_of(plain, PLAIN, overrides)
    await_reference = references.start_run(tmp_path, one_rank)
    two_ranks = {"parallel": {"data": 2}, "optimizer": {"overlap_gradients": True}}
    cut = {"actor": two_ranks, "data": {"task": "tests.helpers.cut_episodes:CutSortDigits"}}
    settings = run_helpers.merged(one_rank, run_helpers.merged(INSIDE, cut))
    with run_helpers.running(tmp_path, settings) as running:
        outcome, expected = await_outcome(running), await_reference()
    ((line,), (expected_line,)) = outcome.lines, expected.lines
    metrics = renamed_metrics(expected_line)
    grad_norm = metrics.pop("loss/grad_norm")
    assert {tag: line[tag] for tag in metrics} == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    assert line["loss/grad_norm"] == pytest.approx(grad_norm, rel=1e-4)
    for name, value in expected.weights.items():
        torch.testing.assert_close(outcome.weights[name], value, atol=1e-5, rtol=0)
    lengths = assert_episodes_are_cut(outcome, expected)
    assert line["reward/response_tokens"] == pytest.approx(np.mean(lengths)), "counted once each"
    assert_rows_are_shown(running.run, outcome, capsys)
    if effort(0, 1):
        assert_replay_is_equal(running.run, 0, capsys)


def assert_episodes_are_cut(outcome: Outcome, expected: Outcome) -> list[int]:
    """Each row of the reference is one to three rows here, with ids that differ in the last part.

    Return the tokens of each response.
    """
    lengths = []
    for name, expected_row in expected.rows.items():
        episode = parse_row_id(name)[:2]
        rows = [row for name, row in outcome.rows.items() if parse_row_id(name)[:2] == episode]
        length = len(expected_row["token_ids"]) - int(expected_row["prompt_len"])
        assert len(rows) == min(1 + episode[1] % 3, length)
        assert_is_divided(rows, expected_row)
        keys = {(int(row["ticket"]), int(row["episode"]), float(row["reward"])) for row in rows}
        assert keys == {(*episode, float(expected_row["reward"]))}
        lengths.append(length)
    assert len(outcome.rows) > len(expected.rows)
    assert all(len(parse_row_id(name)) == 3 for name in outcome.rows)
    return lengths


def assert_is_divided(rows: list[Row], expected: Row) -> None:
    """The last of ``rows`` has all tokens of ``expected``; together they have its other fields."""
    assert np.array_equal(rows[-1]["token_ids"], expected["token_ids"])
    for field in ("loss_mask", "rollout_logprobs", "advantages"):
        size = len(expected[field])
        padded = [np.pad(row[field], (0, size - len(row[field]))) for row in rows]
        np.testing.assert_allclose(sum(padded), expected[field], atol=1e-6)


def assert_rows_are_shown(
    run: RunDir, outcome: Outcome, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each row is audited, exported and shown with its id."""
    result = audit(run)
    assert result.problems == [] and result.trained == len(outcome.rows) and not result.dropped
    kept = KeptRows(run).rows(0)
    assert [row["row_id"] for row in kept] == sorted(outcome.rows)
    # The other rows of an episode have tokens of the task only, and still have the version.
    assert all(row["versions"] == ["i000001-v000000"] for row in kept)
    assert main(["samples", str(run.root), "--json", "--limit", "0"]) == 0
    samples = json.loads(capsys.readouterr().out)["samples"]
    names = {sample["id"] for sample in samples}
    assert names <= outcome.rows.keys()
    assert {parse_row_id(name)[2] for name in names} == {0, 1, 2}
    for sample in samples:
        assert sample["tokens"] == outcome.rows[sample["id"]]["loss_mask"].sum()
        assert sample["fate"] == "trained i000001-v000000"


def assert_close(outcome: Outcome, expected: Outcome) -> None:
    """Compare up to rounding. Log-probabilities come from other micro-batches, so only the sampled
    tokens are equal."""
    import torch

    assert outcome.rows.keys() == expected.rows.keys()
    for name, row in expected.rows.items():
        assert np.array_equal(outcome.rows[name]["token_ids"], row["token_ids"]), name
    assert len(outcome.lines) == len(expected.lines)
    for line, expected_line in zip(outcome.lines, expected.lines, strict=True):
        metrics = renamed_metrics(expected_line)
        assert {tag: line[tag] for tag in METRICS} == pytest.approx(metrics, rel=1e-3, abs=1e-5)
    for name, value in expected.weights.items():
        torch.testing.assert_close(outcome.weights[name], value, atol=1e-5, rtol=0)


def with_model_of(
    plain: tuple[Outcome, Outcome, Path], base: dict[str, Any], overrides: dict[str, Any]
) -> dict[str, Any]:
    """Settings of a short run that starts with the model of `plain`. A large epsilon of Adam
    prevents that weights follow rounding errors."""
    settings = {
        "warm_start": {"steps": 0},
        "model": {"path": str(plain[2])},
        "actor": {"optimizer": {"eps": 1e-6}},
    }
    return run_helpers.merged(run_helpers.merged(base, settings), overrides)


def test_without_actor_fwd_the_log_probs_of_the_actor_are_the_old_ones(references, plain, tmp_path):
    """On-policy training with a reference in the actor and a user's algorithm."""
    algorithm = {"name": "tests.helpers.own_algorithm:Opo", "scale": 2.0, "passes": 1}
    settings = with_model_of(plain, PLAIN, {"steps": 2, "algorithm": algorithm})
    inside = {"actor": {"forward": ["reference"]}, "groups": {"actor_fwd": None, "reference": None}}
    await_reference = references.start_run(tmp_path, settings)
    with run_helpers.running(tmp_path, run_helpers.merged(settings, inside)) as running:
        outcome = await_outcome(running)
        assert audit(running.run).problems == []
    assert not any({"old_logprobs", "ref_logprobs"} & row.keys() for row in outcome.rows.values())
    # A metric of the user's algorithm.
    assert all(0 < line["algorithm/pushed_away"] < 1 for line in outcome.lines)
    assert_close(outcome, await_reference())


def test_forward_roles_in_the_actor(references, plain, tmp_path, capsys):
    """Two passes of two mini-batches, with a KL to the reference. After a kill the reference
    restarts with the actor. A replay begins at a checkpoint."""
    settings = with_model_of(plain, REGULARISED, {"steps": 3, "checkpoint": {"every": 1}})
    await_reference = references.start_run(tmp_path, settings)
    with run_helpers.running(tmp_path, run_helpers.merged(settings, INSIDE)) as running:
        running.wait_for_step(1, RUN_S)
        running.kill("actor")
        outcome = await_outcome(running)
        assert audit(running.run).problems == []
    assert running.incarnations("actor") == 2
    assert_close(outcome, await_reference())
    first = assert_replay_is_equal(running.run, 2, capsys)
    assert "from checkpoint i00000" in first and first.endswith("training steps 2 to 2")
    for path in running.run.shards.iterdir():
        path.unlink()
    assert main(["replay", str(running.run.root), "--step", "2"]) == EXIT_CONFIG
    assert "rows of steps 2 to 2 are gone; in the next run, queue.keep_steps of at least 1" in (
        capsys.readouterr().err
    )


@pytest.mark.skipif(not effort(0, 1), reason="a control of the others: env/test.sh --all")
def test_another_seed_differs(references, plain, tmp_path):
    outcome, _, model = plain
    overrides = PLAIN | {"seed": 5, "model": {"path": str(model)}, "warm_start": {"steps": 0}}
    await_reference = references.start_run(tmp_path, overrides)
    assert len(different_weights(outcome, await_reference())) == len(outcome.weights)


def test_spare_groups_change_nothing(references, plain, tmp_path):
    """Also after a kill among them: a ticket gets the first of its groups that passes the filter.
    The algorithm uses whole steps."""
    spares = {
        "steps": 2,
        "algorithm": {"name": "reinforce_pp"},
        "rollout": {"filter": "rewards_differ", "over_sampling": 1.0, "groups_per_request": 2},
    }
    settings = with_model_of(plain, PLAIN, spares)
    await_reference = references.start_run(tmp_path, settings)
    with run_helpers.running(tmp_path, settings) as running:
        running.wait_for_step(0, RUN_S)
        running.kill("rollout")
        outcome, result = await_outcome(running), audit(running.run)
        assert_equal(outcome, await_reference())
    assert result.problems == []
    assert result.failed["filtered"] > 0 and result.failed["surplus"] > 0


def test_turns_on_shared_devices_change_nothing(plain, tmp_path):
    """Engines, with spare groups, and actor never work at the same time, also after a kill of
    both."""
    _, expected, model = plain
    groups = {"rollout": None, "actor": {"roles": ["rollout", "actor"]}}
    overrides = {
        "colocate": True,
        "groups": groups,
        "checkpoint": {"every": 1},
        "rollout": {"over_sampling": 0.5},
        "model": {"path": str(model)},
        "warm_start": {"steps": 0},
    }
    with run_helpers.running(tmp_path, run_helpers.merged(PLAIN, overrides)) as running:
        running.wait_for_step(0, RUN_S)
        running.kill("actor")
        outcome = await_outcome(running)
        assert running.incarnations("actor") == 2
    assert_equal(outcome, expected)
    spans = read_spans(running.run.root)
    generating = [span for span in spans if span.what in ("generate", "engine_update", "eval")]
    training = [span for span in spans if span.what == "train"]
    assert generating and training
    for span in generating:
        assert not any(span.start < other.end and other.start < span.end for other in training)
