"""Which engine evaluates: one, for as long as it serves, and another one when it has left."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

from relax_hpc.transfer_queue.client.answers import OWED
from relax_hpc.versions import Version
from relax_hpc.weights.subscriber import NOTHING
from tests.queue_helpers import Roles, in_thread, make_run, small


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
        assert news(1).result() is OWED and not waiting.done()
        serve(1, NOTHING)
        assert waiting.result() is OWED
        idle = news(2)
        weights.evaluated(version.number, {"eval/heldout/answer_exact": 0.5}).result()
        assert not serve(0, version) and not serve(1, version) and not idle.done()
