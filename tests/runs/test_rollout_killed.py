"""A rollout that is killed or stopped at any point: who comes next draws no token again that is in
a log."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS, loss_fields
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config import dump, load_resolved
from relax_hpc.data.tokenizer import load_tokenizer
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.client.segments import append_segments
from relax_hpc.queue.inspect.audit import Ledger
from relax_hpc.queue.storage.record_file import read
from relax_hpc.queue.storage.shard import ShardError
from relax_hpc.rollout.attempt import Attempt
from relax_hpc.rollout.engines.engine import Generation
from relax_hpc.rollout.prompt_source import PromptSource
from relax_hpc.tasks.files import open_train
from tests.helpers.queue_helpers import in_thread, make_run
from tests.requirements import requires

requires("torch", "transformers")

from safetensors.torch import load_file  # noqa: E402

from relax_hpc.training.weights.node_cache import staging_root  # noqa: E402
from tests.helpers.faulty_data import make_data  # noqa: E402
from tests.helpers.routes_engine import routes_of  # noqa: E402
from tests.helpers.run_helpers import ALL  # noqa: E402
from tests.helpers.weights_helpers import publish  # noqa: E402
from tests.runs.drawing_rollout import (  # noqa: E402
    LONG,
    config_of,
    drawn,
    in_process,
    rollout_of,
    routes_process,
    sglang_process,
    stop_server,
)

pytestmark = pytest.mark.run

V0 = Version(1, 0)


def until(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    end, never = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, what
        never.wait(0.02)


def kept_of(mode: str, draws: Sequence[int]) -> tuple[int, int]:
    """Tokens that are kept after incarnations that drew so many each, and how many were lost with
    these."""
    kept = lost = 0
    for count in draws:
        unfinished = (kept + count) % LONG if mode == "samples" else 0
        kept, lost = kept + count - unfinished, lost + unfinished
    return kept, lost


@pytest.fixture(scope="module", autouse=True)
def server():
    yield
    stop_server()


@pytest.fixture
def world(tmp_path: Path):
    run = make_run(tmp_path / "run")
    make_data(tmp_path)
    (tmp_path / "model").rename(run.model)
    config = config_of(run, "tokens")
    dump(config, run.config)
    with in_thread(run, config) as hub, QueueClient(run, config, "actor", 1) as actor:
        actor.connection.call("resume", step=0)
        publish(run, actor, V0, load_file(run.model / "model.safetensors"))
        yield run, hub
    # No supervisor is there to do it.
    shutil.rmtree(staging_root(run), ignore_errors=True)


@pytest.mark.parametrize("mode", ["tokens", "samples"])
@pytest.mark.parametrize("points", [[5], [LONG + 1, 2 * LONG + 3], [4 * LONG - 6, 1, 3]])
def test_a_rollout_killed_anywhere_draws_no_appended_token_again(world, mode, points):
    """The engine has four samples at first: the kills come within the first, between two, in the
    last, and again.

    Of what is drawn whole groups are put, the rest is in logs."""
    run, hub = world
    for incarnation, draws in enumerate(points, start=1):
        (whole, due), made = (
            divmod(kept_of(mode, points[:incarnation])[0], 2 * LONG),
            sum(points[:incarnation]),
        )

        def is_kept(whole: int = whole, due: int = due, made: int = made) -> bool:
            is_put = hub.state.counts.accepted == 2 * whole
            return is_put and hub.state.segments.held == due and drawn(run).total() == made

        with rollout_of(run, incarnation, draws, mode) as process:
            until(is_kept, f"{due} tokens are in logs")
            process.kill()
    lost = kept_of(mode, points)[1]
    with rollout_of(run, len(points) + 1, 10**9, mode):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    counts, often = hub.state.segments.counts(), drawn(run)
    assert counts["held"] == 0 and counts["used"] == counts["appended"] >= due
    assert len(often) == 8 * LONG, "every token of every sample was drawn"
    assert often.total() == 8 * LONG + lost, "of what was appended, nothing was drawn again"
    result = Ledger(run).judge(0)
    assert result.problems == [] and result.accepted == 8
    assert result.segments == {fate: tokens for fate, tokens in counts.items() if tokens}


def rewarded_rows(run: RunDir) -> list[dict[str, Any]]:
    """Rows of rollout that have a reward. Shards of log segments are freed while this looks."""
    rows = []
    for file in run.shards.glob("rollout-*.shard"):
        with contextlib.suppress(ShardError):
            rows += [row for row in read(file).values() if "reward" in row]
    return rows


@pytest.mark.parametrize(("mode", "kept"), [("samples", 30), ("tokens", 32)])
def test_episodes_of_turns_go_on_where_their_rollout_was_killed(
    world, mode: str, kept: int
) -> None:
    """Four episodes at once, turn by turn: of five turns of 4 tokens each the log has the words of
    the environment too, 2 tokens, and of the sixth what was drawn of it, or nothing. They are
    played again against new environments."""
    run, hub = world
    with rollout_of(run, 1, 22, mode, turn=4) as process:
        until(
            lambda: hub.state.segments.held == kept and drawn(run).total() == 22,
            f"{kept} tokens are in logs",
        )
        process.kill()
    with rollout_of(run, 2, 10**9, mode, turn=4):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    counts, often = hub.state.segments.counts(), drawn(run)
    assert counts["held"] == 0 and counts["used"] == counts["appended"] >= kept
    assert len(often) == 8 * 12 and often.total() == 8 * 12 + 32 - kept, (
        "nothing that was logged is drawn again"
    )
    rows = rewarded_rows(run)
    assert [row["finish_reason"] for row in rows] == ["env_done"] * 8 and {
        row["reward"] for row in rows
    } == {2.0}
    assert all(row["environment"]["turns"] == [4, 10, 16] for row in rows)
    assert all((row["token_versions"] != 0).sum() == 12 == row["loss_mask"].sum() for row in rows)
    assert Ledger(run).judge(0).problems == []


def test_slow_episodes_hold_up_their_own_prompt_group_alone(world, tmp_path: Path) -> None:
    run, hub = world
    (tmp_path / "slow").touch()
    with rollout_of(run, 1, 10**9, "samples", turn=4):
        until(lambda: hub.state.counts.accepted == 6, "three prompt groups of four are accepted")
        assert sum(prompt == "0/p100" for prompt, *_ in drawn(run)) == 2 * 4, (
            "its episodes have had their first turns"
        )
        (tmp_path / "slow").unlink()
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")


def test_responses_that_wait_for_their_rewards_are_in_logs(world, tmp_path):
    run, hub = world
    (tmp_path / "slow").touch()
    with rollout_of(run, 1, 10**9, "samples") as process:
        until(lambda: hub.state.segments.held == 4 * LONG, "the first request is appended")
        process.kill()
    (tmp_path / "slow").unlink()
    with rollout_of(run, 2, 10**9, "samples"):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    assert drawn(run).total() == 8 * LONG and hub.state.segments.used == hub.state.segments.appended


def test_what_an_engine_of_ones_own_gives_of_tokens_survives_with_them(world, monkeypatch):
    """Its class declares the field, which every process of the run knows when it has read the
    configuration."""
    run, hub = world
    config = config_of(run, "tokens")
    config.rollout.engine.kind, config.rollout.max_new_tokens = (
        "tests.helpers.routes_engine:RoutesEngine",
        2 * LONG,
    )
    dump(config, run.config)
    known = dict(FIELDS)
    try:
        load_resolved(run.root)
        assert FIELDS["routes"].by == "rollout" and "routes" in loss_fields()
        with in_process(routes_process, run.root, 1) as process:
            until(lambda: hub.state.segments.held >= LONG, "some of what is unfinished is in logs")
            process.kill()
        with in_process(routes_process, run.root, 2):
            until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
        counts = hub.state.segments.counts()
        assert counts["used"] == counts["appended"] >= LONG
        rows = rewarded_rows(run)
        for row in rows:
            start = row["prompt_len"]
            assert np.array_equal(
                row["routes"][start:], routes_of(row["token_ids"][start:].tolist())
            )
            assert len(row["token_ids"]) == start + 2 * LONG and not row["routes"][:start].any()
        assert len(rows) == 8
        FIELDS["routes"] = replace(FIELDS["routes"], dtype="int32")
        with pytest.raises(
            ConfigError, match=r"rollout\.engine\.kind: found field routes, .* no other field has"
        ):
            load_resolved(run.root)
    finally:
        FIELDS.clear()
        FIELDS.update(known)


def test_spares_are_put_as_they_are(world):
    run, hub = world
    config = config_of(run, "samples")
    source = PromptSource(open_train(run, config, load_tokenizer(run.model)), config)
    spare = Attempt(9, 1, source.prompt(9, 1), 2)
    for draft in spare.drafts:
        draft.ended = Generation([5], [-1.0], np.array([V0.encode()], np.int32), "length")
    with QueueClient(run, config, "rollout", 1) as client:
        assert append_segments(client, spare.new_segments(False, LONG), {9: 1}, spare=True) == {}
    with rollout_of(run, 2, 10**9, "samples"):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    assert {place[0] for place in drawn(run)} == {"1/p101", "2/p102", "3/p103"}
    counts = hub.state.segments.counts()
    assert counts["used"] == counts["appended"] >= 2


def test_a_rollout_that_is_asked_to_stop_hands_over_what_it_has(world):
    run, hub = world
    with rollout_of(run, 1, LONG + 4, "tokens", every_s=1000.0) as process:
        until(lambda: drawn(run).total() == LONG + 4, "drawn")
        assert hub.state.segments.held == 0
        process.terminate()
        until(lambda: hub.state.segments.held == LONG + 4, "appended")


@pytest.mark.skipif(not ALL, reason="a real engine is started twice by env/test.sh --all")
def test_sglang_goes_on_where_it_was_killed(world):
    requires("sglang")
    run, hub = world
    with in_process(sglang_process, run.root, 1) as process:
        until(lambda: hub.state.segments.held > 0, "tokens of unfinished responses are appended")
        process.kill()
    kept = hub.state.segments.held
    with in_process(sglang_process, run.root, 2):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    counts = hub.state.segments.counts()
    assert counts["held"] == 0 and counts["used"] == counts["appended"] >= kept
    assert Ledger(run).judge(0).problems == []
