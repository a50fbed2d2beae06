"""The small parts of the roles: advantages, sharing over ranks, the hub's board, an engine's
activity."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relax_hpc.algorithms import Grpo
from relax_hpc.base.local_dir import LOCAL_DIR
from relax_hpc.base.metrics.read import read_metrics
from relax_hpc.base.metrics.spans import Spans
from relax_hpc.base.metrics.writer import COMPONENT_COUNT, COMPONENT_SUM
from relax_hpc.cluster.supervise.processes import role_environment
from relax_hpc.config.schema import Config, ForwardConfig
from relax_hpc.net.rendezvous.exit_mark import write_exit_mark
from relax_hpc.queue.controller.state.queue_state import QueueState
from relax_hpc.queue.plan import Plan
from relax_hpc.queue.row_ids import row_id
from relax_hpc.queue.samplers import greedy_split
from relax_hpc.roles.advantages import advantages_of
from relax_hpc.roles.board import Board
from relax_hpc.roles.event_loop import first_error
from relax_hpc.rollout.engine_activity import Activity
from relax_hpc.rollout.outcomes import Failure, generated_metrics
from tests.requirements import requires


def rows_with(rewards: list[float], samples: int) -> list[dict]:
    mask = np.array([0, 1, 1], np.uint8)
    return [
        {
            "row_id": row_id(n // samples, n % samples),
            "ticket": n // samples,
            "reward": r,
            "loss_mask": mask,
        }
        for n, r in enumerate(rewards)
    ]


def test_advantages_stay_within_their_prompt_group() -> None:
    made = advantages_of(rows_with([0.0, 1.0, 5.0, 5.0], 2), Grpo(), seed=0)
    values = [row["advantages"].tolist() for row in made]
    half = 2**-0.5
    np.testing.assert_allclose(
        values, [[0, -half, -half], [0, half, half], [0, 0, 0], [0, 0, 0]], atol=1e-5
    )


def test_the_control_permutes_rewards_reproducibly() -> None:
    rows, algorithm = rows_with(list(np.linspace(0, 1, 32)), 4), Grpo(shuffle_rewards=True)
    one, two = (advantages_of(rows, algorithm, seed=1) for _ in range(2))
    plain = advantages_of(rows, Grpo(), seed=1)
    assert all(
        np.array_equal(a["advantages"], b["advantages"]) for a, b in zip(one, two, strict=True)
    )
    assert any(
        not np.array_equal(a["advantages"], b["advantages"])
        for a, b in zip(one, plain, strict=True)
    )


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_sharing_is_a_partition_within_its_bound(sizes: list[int], ranks: int) -> None:
    shares = greedy_split(sizes, ranks)
    assert sorted(item for items in shares for item in items) == list(range(len(sizes)))
    best = max([*sizes, sum(sizes) / ranks]) if sizes else 0
    assert (
        max(sum(sizes[item] for item in items) for items in shares)
        <= 4 / 3 * best + max(sizes, default=0) / 3
    )


def test_a_window_of_one_prompt_group_is_shared_by_all_ranks() -> None:
    requires("torch", "megatron")
    from relax_hpc.roles.ranks import Ranks
    from relax_hpc.training.parallel import RankLayout

    rows = [{"token_ids": [0] * 5}] * 4
    ranks = Ranks.__new__(Ranks)
    taken = []
    for rank in range(4):
        ranks.layout = RankLayout(0, 1, 0, 1, data_rank=rank, data_size=4)
        taken += ranks.assign_micro_batches(rows, ForwardConfig(max_tokens_per_micro_batch=10))
    assert sorted(taken) == [[0], [1], [2], [3]]


def test_a_mark_is_never_replaced_by_one_that_says_less(tmp_path: Path) -> None:
    mark = tmp_path / "exit-actor.json"
    for code, stays in ((0, 0), (75, 75), (93, 93), (75, 93), (0, 93)):
        write_exit_mark(mark, code)
        assert json.loads(mark.read_text())["code"] == stays


def test_a_cpu_run_sees_no_gpu() -> None:
    config = Config()
    assert (
        role_environment(config, {"A": "b", "CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"]
        == ""
    )
    config.model.device = "cuda"
    assert role_environment(config, {"CUDA_VISIBLE_DEVICES": "1"})["CUDA_VISIBLE_DEVICES"] == "1"


def test_a_local_run_keeps_its_caches_where_the_site_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "me")
    monkeypatch.delenv(LOCAL_DIR, raising=False)
    config = Config()
    assert LOCAL_DIR not in role_environment(config)
    config.site.local_dir = "/nvme"
    assert role_environment(config)[LOCAL_DIR] == "/nvme/me-relax"
    monkeypatch.setenv(LOCAL_DIR, "/by/a/batch/script")
    assert role_environment(config)[LOCAL_DIR] == "/by/a/batch/script"


def board(tmp_path: Path) -> Board:
    return Board(tmp_path, 1, 10, QueueState(Plan.from_config(Config())))


def test_the_actors_report_closes_a_step(tmp_path: Path) -> None:
    hub = board(tmp_path)
    hub.report("rollout", 0, {"perf/rollout_tokens": 100.0}, {"generate": 2.0, "wait": 2.0})
    hub.report("rollout", 0, {"perf/rollout_tokens": 50.0}, {"generate": 1.0})
    hub.report("actor_fwd", 0, {"queue/by_shm_bytes": 7.0}, {})
    hub.report("eval", 0, {"eval/test/answer_exact": 0.25}, {})
    assert all("reward/mean" not in row for row in read_metrics(tmp_path))
    hub.report(
        "actor",
        0,
        {"reward/mean": 0.5, "perf/trained_tokens": 300.0, "queue/by_shm_bytes": 2.0},
        {"train": 3.0, "wait": 1.0},
    )
    hub.close()
    (row,) = read_metrics(tmp_path)
    assert row["step"] == 0 and row["reward/mean"] == 0.5 and row["eval/test/answer_exact"] == 0.25
    assert row["perf/rollout_tokens"] == 150.0 and row["perf/rollout_tokens_per_s"] == 50.0
    assert row["queue/by_shm_bytes"] == 9.0
    assert (
        row["idle/rollout"] == 0.4
        and row["idle/actor"] == 0.25
        and row["perf/train_tokens_per_s"] == 100.0
    )


def test_the_mean_of_all_that_was_generated_stands_beside_that_of_what_was_kept(
    tmp_path: Path,
) -> None:
    hub = board(tmp_path)
    kept, dropped = (
        [{"reward": 1.0, "row": 0}, {"reward": 0.0, "row": 0}, {"reward": 0.0, "row": 1}],
        Failure("filtered", "", (1.0, 1.0)),
    )
    for groups in ([kept, dropped], [Failure("timeout", ""), dropped]):
        hub.report("rollout", 0, generated_metrics(groups), {})
        hub.report("rollout", 0, {COMPONENT_SUM + "form": 1.5, COMPONENT_COUNT + "form": 2.0}, {})
    for step in range(2):
        hub.report("actor", step, {"reward/mean": 0.5}, {})
    hub.close()
    first, second = read_metrics(tmp_path)
    assert (first["reward/mean"], first["reward/mean_generated"], first["reward/generated"]) == (
        0.5,
        5 / 6,
        6,
    )
    assert first["reward/component_form"] == 0.75
    assert not [tag for tag in first if "_sum" in tag or "_count" in tag]
    assert not {"reward/mean_generated", "reward/component_form"}.intersection(second), (
        "nothing was generated since"
    )


def test_overlapping_requests_count_once(tmp_path: Path) -> None:
    spans = Spans(tmp_path / "spans-rollout-0.jsonl", "rollout")
    activity = Activity(spans)
    with activity("generate", 3):
        with activity("generate", 4):
            pass
        with activity("engine_update", 5):
            pass
    spans.close()
    lines = [
        json.loads(line)
        for line in (tmp_path / "spans-rollout-0.jsonl").read_text().splitlines()[1:-1]
    ]
    assert [(line["what"], line["step"]) for line in lines] == [
        ("wait", None),
        ("engine_update", 5),
        ("generate", 3),
    ]


def test_an_engine_waits_for_environments_while_all_its_episodes_are_with_them(
    tmp_path: Path,
) -> None:
    spans = Spans(tmp_path / "spans-rollout-0.jsonl", "rollout")
    activity = Activity(spans)
    with activity.playing(), activity.playing():
        with activity("generate", 3):
            pass
        activity.set_wait_causes([("hub", "other", 1.0)])
    spans.close()
    lines = [
        json.loads(line)
        for line in (tmp_path / "spans-rollout-0.jsonl").read_text().splitlines()[1:-1]
    ]
    told = [(line["what"], line.get("peer", "")) for line in lines]
    tickets, environments = ("wait", "actor"), ("wait", "environments")
    assert told == [tickets, environments, ("generate", ""), environments]


def test_the_error_that_counts_is_the_one_that_restarting_cannot_cure() -> None:
    from relax_hpc.base.errors import ConfigError, RelaxError

    wrong = ConfigError("wrong")
    assert (
        first_error(BaseExceptionGroup("", [RelaxError("a"), BaseExceptionGroup("", [wrong])]))
        is wrong
    )


def test_an_evaluation_is_due_at_the_start_every_so_often_and_at_the_end() -> None:
    plan = Plan.from_config(Config(steps=7))
    plan = Plan(**{name: getattr(plan, name) for name in Plan.__slots__} | {"eval_every": 3})
    evaluated, due = -1, []
    for version in range(8):
        if plan.eval_due(evaluated, version):
            due.append(version)
            evaluated = version
    assert due == [0, 3, 6, 7]
