"""At max_staleness 0 five roles that are killed and restarted equal one synchronous loop, bit for
bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

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
# A prompt group is at most 40 tokens: three or so fit a window of the actor or one of actor_fwd,
# and a group is cut for the actor and the reference. Which samples share a micro-batch changes the
# last bits of losses and weights.
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
"""The actor scores too: two processes fewer that import torch."""
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
"""Tag of metrics.jsonl -> name in the reference's line."""


@dataclass(slots=True)
class Outcome:
    """What a run, or the reference, came to."""

    lines: list[dict[str, Any]]
    rows: dict[str, Row]
    weights: dict[str, Tensor]


class References:
    """The reference loop in a process of its own, which does one run after the other: most of one
    is its start."""

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

    def begin(self, directory: Path, overrides: dict[str, Any]) -> Callable[[], Outcome]:
        """Start a reference run; call what this returns to wait for its outcome."""
        config, root = (
            run_helpers.write_config(directory / "reference.yaml", overrides),
            directory / "reference",
        )
        self.process.stdin.write(f"{config} {root}\n")
        self.process.stdin.flush()
        return partial(self._outcome, root)

    def _outcome(self, root: Path) -> Outcome:
        from safetensors.torch import load_file

        lines: list[str] = []
        while (line := self.process.stdout.readline().rstrip()) != str(root):
            assert line, self.errors.read_text()
            # What a test that failed has not waited for ends with its own folder.
            lines = [*lines, line] if line.startswith("{") else []
        return Outcome(
            list(map(json.loads, lines)),
            record_file.read(root / "rows.shard"),
            load_file(root / "weights.safetensors"),
        )

    def end(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=RUN_S)


@contextmanager
def reference(directory: Path, overrides: dict[str, Any]) -> Iterator[Callable[[], Outcome]]:
    """One alone; call what this yields to wait for its outcome."""
    made = References(directory / "errors.txt")
    try:
        yield made.begin(directory, overrides)
    finally:
        made.end()


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    """What a configuration names of these tests, for runs and the reference alike."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
        yield


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[References]:
    made = References(tmp_path_factory.mktemp("references") / "errors.txt")
    yield made
    made.end()


def outcome_of(running: Running) -> Outcome:
    """Wait for the run's end and read what it left."""
    running.finish(RUN_S)
    run = running.run
    return Outcome(
        run_helpers.trained_steps(run), run_helpers.queue_rows(run), run_helpers.final_weights(run)
    )


def assert_equal(found: Outcome, expected: Outcome) -> None:
    """Rows first, then losses by step, then weights: the first difference is nearest to its
    cause."""
    assert found.rows.keys() == expected.rows.keys()
    for name, row in expected.rows.items():
        for field in EXACT:
            assert np.array_equal(found.rows[name][field], row[field]), f"{field} of {name}"
    assert len(found.lines) == len(expected.lines)
    for line, should in zip(found.lines, expected.lines, strict=True):
        assert {tag: line[tag] for tag in METRICS} == {
            tag: should[name] for tag, name in METRICS.items()
        }
    assert different(found, expected) == []


def different(one: Outcome, other: Outcome) -> list[str]:
    """Names of weights that are not bit-equal."""
    import torch

    assert one.weights.keys() == other.weights.keys()
    return [
        name for name, value in one.weights.items() if not torch.equal(value, other.weights[name])
    ]


@pytest.fixture(scope="module")
def plain(
    references: References, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, Outcome, Path]:
    """A run whose actor_fwd hears late of versions, its reference, and the model that both began
    with."""
    directory = tmp_path_factory.mktemp("plain")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in late_news.environment(directory / "hook").items():
            patch.setenv(name, value)
        expected = references.begin(directory, PLAIN)
        with run_helpers.running(directory, PLAIN) as running:
            found, should = outcome_of(running), expected()
    (log,) = running.run.logs("actor_fwd", 1).glob("actor_fwd-rank-0.log")
    late = [line for line in log.read_text().splitlines() if line.startswith(late_news.SAID)]
    assert late == [f"{late_news.SAID} {step}" for step in (1, 2)], "wherever it could be"
    return found, should, running.run.model


def test_a_run_equals_the_synchronous_loop(plain):
    found, expected, _ = plain
    assert len(found.rows) == 48 and len(found.lines) == 3
    assert all(line["reward/std"] > 0 for line in found.lines), (
        "without a signal weights would hardly move"
    )
    assert_equal(found, expected)


def test_two_data_ranks_train_as_one_on_episodes_that_were_cut_into_rows(
    references, plain, tmp_path, capsys
):
    """Each on its share of every window, while the rest is still generated; sums differ only in
    their order. An episode's rows may be of both ranks, and of several micro-batches; together they
    weigh as much as if it were one."""
    import torch

    over = {"steps": 1, "actor": {"balance_window": 1}, "algorithm": {"reduction": "sequence_mean"}}
    alone = with_model_of(plain, PLAIN, over)
    expected = references.begin(tmp_path, alone)
    two = {"parallel": {"data": 2}, "optimizer": {"overlap_gradients": True}}
    cut = {"actor": two, "data": {"task": "tests.helpers.cut_episodes:CutSortDigits"}}
    with run_helpers.running(
        tmp_path, run_helpers.merged(alone, run_helpers.merged(INSIDE, cut))
    ) as running:
        found, should = outcome_of(running), expected()
    ((line,), (wanted,)) = found.lines, should.lines
    same = {tag: name for tag, name in METRICS.items() if tag != "loss/grad_norm"}
    assert {tag: line[tag] for tag in same} == pytest.approx(
        {t: wanted[n] for t, n in same.items()}, rel=1e-3, abs=1e-5
    )
    assert line["loss/grad_norm"] == pytest.approx(wanted["grad_norm"], rel=1e-4)
    for name, value in should.weights.items():
        torch.testing.assert_close(found.weights[name], value, atol=1e-5, rtol=0)
    assert_cut(found, should, line)
    assert_shown(running.run, found, capsys)


def assert_cut(found: Outcome, should: Outcome, line: dict[str, float]) -> None:
    """The rows are those of the reference in one to three pieces, told apart by their ids."""
    counts = []
    for name, whole in should.rows.items():
        ticket, episode, _ = parse_row_id(name)
        pieces = [
            row for name, row in found.rows.items() if parse_row_id(name)[:2] == (ticket, episode)
        ]
        made = len(whole["token_ids"]) - int(whole["prompt_len"])
        assert len(pieces) == min(1 + episode % 3, made)
        assert np.array_equal(pieces[-1]["token_ids"], whole["token_ids"])
        for field in ("loss_mask", "rollout_logprobs", "advantages"):
            together = sum(
                np.pad(row[field], (0, len(whole[field]) - len(row[field]))) for row in pieces
            )
            np.testing.assert_allclose(together, whole[field], atol=1e-6)
        assert {
            (int(row["ticket"]), int(row["episode"]), float(row["reward"])) for row in pieces
        } == {(ticket, episode, float(whole["reward"]))}
        counts += [made]
    assert {len(place) for place in map(parse_row_id, found.rows)} == {3} and len(found.rows) > len(
        should.rows
    )
    assert line["reward/response_tokens"] == pytest.approx(np.mean(counts)), "each is sampled once"


def assert_shown(run: RunDir, found: Outcome, capsys: pytest.CaptureFixture[str]) -> None:
    """Each row is audited, exported and shown by its own id."""
    result = audit(run)
    assert result.problems == [] and result.trained == len(found.rows) and not result.dropped
    kept = KeptRows(run).rows(0)
    assert [row["row_id"] for row in kept] == sorted(found.rows)
    assert all(row["versions"] == ["i000001-v000000"] for row in kept), "nobody sampled the rest"
    assert main(["samples", str(run.root), "--json", "--limit", "0"]) == 0
    shown = {one["id"]: one for one in json.loads(capsys.readouterr().out)["samples"]}
    assert shown.keys() <= found.rows.keys() and {parse_row_id(name)[2] for name in shown} == {
        0,
        1,
        2,
    }
    for name, one in shown.items():
        assert (
            one["tokens"] == found.rows[name]["loss_mask"].sum()
            and one["fate"] == "trained i000001-v000000"
        )


def assert_close(found: Outcome, expected: Outcome) -> None:
    """As `assert_equal` up to rounding: log-probs come from other micro-batches, so only what was
    sampled is equal."""
    import torch

    assert found.rows.keys() == expected.rows.keys()
    for name, row in expected.rows.items():
        assert np.array_equal(found.rows[name]["token_ids"], row["token_ids"]), name
    assert len(found.lines) == len(expected.lines)
    for line, should in zip(found.lines, expected.lines, strict=True):
        assert {tag: line[tag] for tag in METRICS} == pytest.approx(
            {tag: should[name] for tag, name in METRICS.items()}, rel=1e-3, abs=1e-5
        )
    for name, value in expected.weights.items():
        torch.testing.assert_close(found.weights[name], value, atol=1e-5, rtol=0)


def with_model_of(
    plain: tuple[Outcome, Outcome, Path], base: dict[str, Any], over: dict[str, Any]
) -> dict[str, Any]:
    """Settings of a short run that begins with the model of `plain`, whose weights do not follow
    rounding noise."""
    quick = {
        "warm_start": {"steps": 0},
        "model": {"path": str(plain[2])},
        "actor": {"optimizer": {"eps": 1e-6}},
    }
    return run_helpers.merged(run_helpers.merged(base, quick), over)


def test_without_actor_fwd_the_actors_own_log_probs_are_the_old_ones(references, plain, tmp_path):
    """True on-policy, with a reference inside of the actor, and a user's own algorithm."""
    own = {"name": "tests.helpers.own_algorithm:Opo", "scale": 2.0, "passes": 1}
    once = with_model_of(plain, PLAIN, {"steps": 2, "algorithm": own})
    inside = {"actor": {"forward": ["reference"]}, "groups": {"actor_fwd": None, "reference": None}}
    expected = references.begin(tmp_path, once)
    with run_helpers.running(tmp_path, run_helpers.merged(once, inside)) as running:
        found = outcome_of(running)
        assert audit(running.run).problems == []
    assert not any({"old_logprobs", "ref_logprobs"} & row.keys() for row in found.rows.values())
    assert all(0 < line["algorithm/pushed_away"] < 1 for line in found.lines), (
        "a metric that only this one has"
    )
    assert_close(found, expected())


def test_forward_roles_inside_of_the_actor(references, plain, tmp_path):
    """Two passes of two mini-batches, with a KL to the reference, which comes back with the
    actor."""
    settings = with_model_of(plain, REGULARISED, {"steps": 3, "checkpoint": {"every": 1}})
    expected = references.begin(tmp_path, settings)
    with run_helpers.running(tmp_path, run_helpers.merged(settings, INSIDE)) as running:
        running.wait_for_step(1, RUN_S)
        running.kill("actor")
        found = outcome_of(running)
        assert audit(running.run).problems == []
    assert running.incarnations("actor") == 2
    assert_close(found, expected())


@pytest.mark.skipif(not effort(0, 1), reason="a control of the others: env/test.sh --all")
def test_another_seed_differs(references, plain, tmp_path):
    found, _, model = plain
    overrides = PLAIN | {"seed": 5, "model": {"path": str(model)}, "warm_start": {"steps": 0}}
    other = references.begin(tmp_path, overrides)
    assert len(different(found, other())) == len(found.weights)


def test_spare_groups_change_nothing(references, plain, tmp_path):
    """Nor does a kill among them: a ticket gets the first of its groups that passes the filter. The
    algorithm looks at whole steps."""
    spare = {
        "steps": 2,
        "algorithm": {"name": "reinforce_pp"},
        "rollout": {"filter": "rewards_differ", "over_sampling": 1.0, "groups_per_request": 2},
    }
    settings = with_model_of(plain, PLAIN, spare)
    expected = references.begin(tmp_path, settings)
    with run_helpers.running(tmp_path, settings) as running:
        running.wait_for_step(0, RUN_S)
        running.kill("rollout")
        found, proof = outcome_of(running), audit(running.run)
        assert_equal(found, expected())
    assert proof.problems == [] and proof.failed["filtered"] > 0 and proof.failed["surplus"] > 0


def test_taking_turns_on_shared_devices_changes_nothing(plain, tmp_path):
    """Engines, with spare groups, and actor are never at work at the same time, also after a kill
    that takes both."""
    _, expected, model = plain
    groups = {"rollout": None, "actor": {"roles": ["rollout", "actor"]}}
    turns = {
        "colocate": True,
        "groups": groups,
        "checkpoint": {"every": 1},
        "rollout": {"over_sampling": 0.5},
    }
    over = run_helpers.merged(
        PLAIN, turns | {"model": {"path": str(model)}, "warm_start": {"steps": 0}}
    )
    with run_helpers.running(tmp_path, over) as running:
        running.wait_for_step(0, RUN_S)
        running.kill("actor")
        found = outcome_of(running)
        assert running.incarnations("actor") == 2
    assert_equal(found, expected)
    spans = read_spans(running.run.root)
    generated = [(s.start, s.end) for s in spans if s.what in ("generate", "engine_update", "eval")]
    trained = [(s.start, s.end) for s in spans if s.what == "train"]
    assert generated and trained
    assert not [
        (one, other)
        for one, other in product(generated, trained)
        if one[0] < other[1] and other[0] < one[1]
    ]
