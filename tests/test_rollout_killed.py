"""A rollout that is killed or stopped at any point: who comes next draws no token again that the queue has kept."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from relax_hpc.config import dump
from relax_hpc.transfer_queue.client import QueueClient
from relax_hpc.transfer_queue.client.partials import keep
from relax_hpc.transfer_queue.inspect.audit import Ledger
from relax_hpc.versions import Version
from tests.queue_helpers import in_thread, make_run, rows_of
from tests.requirements import requires

requires("torch", "transformers")

from safetensors.torch import load_file  # noqa: E402

from relax_hpc.weights.node_cache import staging_root  # noqa: E402
from tests.drawing_rollout import LONG, config_of, drawn, in_process, rollout_of, sglang_process, stop_server  # noqa: E402
from tests.run_helpers import ALL  # noqa: E402
from tests.test_bad_input import make_data  # noqa: E402
from tests.weights_helpers import publish  # noqa: E402

pytestmark = pytest.mark.run

V0 = Version(1, 0)


def until(condition: Callable[[], bool], what: str, seconds: float = 240.0) -> None:
    end, never = time.monotonic() + seconds, threading.Event()
    while not condition():
        assert time.monotonic() < end, what
        never.wait(0.02)


def kept_of(mode: str, draws: Sequence[int]) -> tuple[int, int]:
    """Tokens that are kept after incarnations that drew so many each, and how many were lost with these."""
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
def test_a_rollout_killed_anywhere_draws_no_kept_token_again(world, mode, points):
    """The engine has four samples at first: the kills come within the first, between two, in the last, and again.

    Of what is drawn whole groups are put, the rest is kept."""
    run, hub = world
    for incarnation, draws in enumerate(points, start=1):
        (whole, due), made = divmod(kept_of(mode, points[:incarnation])[0], 2 * LONG), sum(points[:incarnation])

        def is_kept(whole: int = whole, due: int = due, made: int = made) -> bool:
            is_put = hub.state.counts.accepted == 2 * whole
            return is_put and hub.state.kept.held == due and drawn(run).total() == made

        with rollout_of(run, incarnation, draws, mode) as process:
            until(is_kept, f"{due} tokens are kept")
            process.kill()
    lost = kept_of(mode, points)[1]
    with rollout_of(run, len(points) + 1, 10**9, mode):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    counts, often = hub.state.kept.counts(), drawn(run)
    assert counts["again"] == 0 and counts["held"] == 0 and counts["used"] == counts["total"] >= due
    assert len(often) == 8 * LONG, "every token of every sample was drawn"
    assert often.total() == 8 * LONG + lost, "of what was kept, nothing was drawn again"
    result = Ledger(run).judge(0)
    assert result.problems == [] and result.accepted == 8
    assert result.kept == {fate: tokens for fate, tokens in counts.items() if tokens}


def test_responses_that_wait_for_their_rewards_are_kept(world, tmp_path):
    run, hub = world
    (tmp_path / "slow").touch()
    with rollout_of(run, 1, 10**9, "samples") as process:
        until(lambda: hub.state.kept.held == 4 * LONG, "the first request is kept")
        process.kill()
    (tmp_path / "slow").unlink()
    with rollout_of(run, 2, 10**9, "samples"):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    assert drawn(run).total() == 8 * LONG and hub.state.kept.again == 0


def test_surplus_groups_are_put_as_they_are(world):
    run, hub = world
    with QueueClient(run, config_of(run, "samples"), "rollout", 1) as client:
        assert keep(client, rows_of([9], V0), {9: 1}, surplus=True) == {}
    with rollout_of(run, 2, 10**9, "samples"):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    assert {place[0] for place in drawn(run)} == {"1/p101", "2/p102", "3/p103"}
    counts = hub.state.kept.counts()
    assert counts["used"] == counts["total"] and counts["again"] == counts["held"] == 0


def test_a_rollout_that_is_asked_to_stop_hands_over_what_it_has(world):
    run, hub = world
    with rollout_of(run, 1, LONG + 4, "tokens", every_s=1000.0) as process:
        until(lambda: drawn(run).total() == LONG + 4, "drawn")
        assert hub.state.kept.held == 0
        process.terminate()
        until(lambda: hub.state.kept.held == LONG + 4, "kept")


@pytest.mark.skipif(not ALL, reason="a real engine is started twice by env/test.sh --all")
def test_sglang_goes_on_where_it_was_killed(world):
    requires("sglang")
    run, hub = world
    with in_process(sglang_process, run.root, 1) as process:
        until(lambda: hub.state.kept.held > 0, "tokens of unfinished responses are kept")
        process.kill()
    kept = hub.state.kept.held
    with in_process(sglang_process, run.root, 2):
        until(lambda: hub.state.counts.accepted == 8, "all prompt groups are accepted")
    counts = hub.state.kept.counts()
    assert counts["again"] == counts["held"] == 0 and counts["used"] == counts["total"] >= kept
    assert Ledger(run).judge(0).problems == []
