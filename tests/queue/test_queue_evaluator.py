"""Which engine evaluates: one at a time, and another one when it has left or cannot load what is
due."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from relax_hpc.base.versions import Version
from relax_hpc.queue.client.answers import EVALUATION_DUE
from relax_hpc.training.weights.subscriber import NOTHING
from tests.helpers.queue_helpers import Roles, in_thread, make_run, small


def test_whoever_serves_evaluates_when_the_one_who_owed_it_leaves(tmp_path: Path) -> None:
    config = small(eval_every=1)
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        version, weights = roles.start(), roles["rollout"].weights

        def serve(number: int, served: Version, evaluates: bool = True) -> bool:
            return weights.serve(f"rollout/{number}", served, evaluates).result()

        def news(number: int) -> Future:
            return weights.newer(version, evaluator=f"rollout/{number}")

        assert not serve(7, version, evaluates=False)
        assert [serve(number, version) for number in (1, 0, 2)] == [True, False, False]
        waiting = news(0)
        assert news(1).result() is EVALUATION_DUE and not waiting.done()
        serve(1, NOTHING)
        assert waiting.result() is EVALUATION_DUE
        idle = news(2)
        weights.evaluated(version.number, {"eval/heldout/answer_exact": 0.5}).result()
        assert not serve(0, version) and not serve(1, version) and not idle.done()


def test_a_hub_that_begins_anew_tells_no_second_engine_to_evaluate(tmp_path: Path) -> None:
    config = small(eval_every=1)
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        served = [
            roles["rollout"].weights.serve(f"rollout/{number}", version, True) for number in (1, 0)
        ]
        assert [one.result() for one in served] == [True, False]
    with in_thread(run, config), Roles(run, config) as roles:
        weights = roles["rollout"].weights
        waiting = weights.newer(version, evaluator="rollout/0")
        assert (
            weights.newer(version, evaluator="rollout/1").result() is EVALUATION_DUE
            and not waiting.done()
        )
        weights.serve("rollout/1", NOTHING, True).result()
        assert waiting.result() is EVALUATION_DUE


def test_whoever_cannot_load_the_last_version_does_not_keep_others_from_evaluating_it(
    tmp_path: Path,
) -> None:
    config = small(eval_every=1)
    run = make_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        first, second, weights = roles.start(), Version(1, 1), roles["rollout"].weights
        assert weights.serve("rollout/0", first, True).result()
        roles["actor"].connection.call("publish", version=str(second), digest="d")
        assert not weights.serve("rollout/1", second, True).result(), "0 is at it"
        waiting = weights.newer(second, evaluator="rollout/1")
        weights.evaluated(first.number, {}).result()
        assert waiting.result() is EVALUATION_DUE


def test_engines_that_take_turns_with_the_actor_are_told_to_evaluate_by_what_they_load_alone(
    tmp_path: Path,
) -> None:
    """One that waits for news may have made room, whoever was told to evaluate before."""
    config = small(eval_every=1)
    config.colocate, config.rollout.replicas = True, 2
    run = make_run(tmp_path / "run")
    with in_thread(run, config) as hub, Roles(run, config) as roles:
        version, weights = roles.start(), roles["rollout"].weights
        assert [
            weights.serve(f"rollout/{number}", version, True).result() for number in (0, 1)
        ] == [True, False]
        hub.service.state.weights.evaluator = ""
        waiting = weights.newer(version, evaluator="rollout/1")
        later = Version(1, 1)
        weights.evaluated(version.number, {}).result()
        roles["actor"].connection.call("publish", version=str(later), digest="d")
        assert waiting.result() is not EVALUATION_DUE
        assert weights.serve("rollout/1", later, True).result()
