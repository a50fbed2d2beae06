"""Several roles that train: a step is trained when all have trained it, a checkpoint is one cut
over all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.queue.inspect.journal_copy import journal_records
from tests.helpers.audit import audit
from tests.helpers.run_helpers import LIGHT, Running, merged, running, trained_steps
from tests.requirements import requires
from tests.runs import twin_role

requires("mpi", "torch", "megatron", "transformers")

pytestmark = pytest.mark.run

STEPS, EVERY = 8, 2
OVER = merged(
    LIGHT,
    {
        "steps": STEPS,
        "actor": {"forward": []},
        "rollout": {"reward": "tests.runs.twin_role:reward"},
        "checkpoint": {"every": EVERY, "keep_last": 2},
        # The twin is held now and then: two steps ahead of it the actor waits.
        "queue": {"max_rows": 32},
        "groups": {"twin": {"roles": ["twin"]}},
    },
)
WAIT_S = 120.0


def wholes(live: Running) -> dict[int, set[str]]:
    """Of every checkpoint that was journaled, by step, who has saved a part of it so far."""
    parts: dict[int, set[str]] = {}
    for record in journal_records(live.run):
        if record["op"] == "checkpoint":
            parts.setdefault(record["step"], set()).add(record["task"])
    return parts


def resumed(live: Running) -> list[tuple[str, int]]:
    """Who went on at which step, in the order in which they did."""
    return [
        (record["task"], record["step"])
        for record in journal_records(live.run)
        if record["op"] == "resume"
    ]


def test_two_trainers_go_back_to_one_cut_and_end_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The twin is killed with its part written and not journaled: what the actor has saved of that
    step does not count. The actor is killed when the twin is beyond the last cut: the twin goes
    back to it too."""
    for name, value in twin_role.install(tmp_path).items():
        monkeypatch.setenv(name, value)
    for point in ("part-2", "trained-4"):
        twin_role.ask_for(tmp_path, point)
    with running(tmp_path, OVER) as live:
        live.wait_until(lambda: twin_role.is_held(tmp_path, "part-2"), "the twin saves", WAIT_S)
        live.wait_until(
            lambda: wholes(live).get(2) == {"actor"}, "the actor has saved its part", WAIT_S
        )
        live.kill("twin")
        live.wait_until(
            lambda: twin_role.is_held(tmp_path, "trained-4"), "the twin is ahead of step 4", WAIT_S
        )
        assert resumed(live)[2:] == [("twin", 0)], (
            "from where both have saved; the actor need not go back"
        )
        live.wait_until(lambda: wholes(live).get(4) == {"actor", "twin"}, "step 4 is saved", WAIT_S)
        live.kill("actor")
        live.wait_until(lambda: ("actor", 4) in resumed(live), "the actor goes on", WAIT_S)
        twin_role.let_go(tmp_path, "trained-4")
        live.finish(WAIT_S)
    assert resumed(live)[3:] == [("actor", 4), ("twin", 4)] and live.incarnations("twin") == 3
    assert [row["step"] for row in trained_steps(live.run)] == list(range(STEPS))
    assert any(row.get("trainer/twin_loss_grad_norm") for row in trained_steps(live.run)), (
        "of the step before, at times"
    )
    result = audit(live.run)
    assert result.problems == [] and set(result.dropped) <= {"rolled_back", "lost"}
    mine, twins = dict(live.run.saved()), dict(live.run.saved("twin"))
    # Whoever saves first does not know yet that there is one more.
    assert {STEPS - EVERY, STEPS} <= {*mine} & {*twins} and {*mine, *twins} <= {
        STEPS - 2 * EVERY,
        STEPS - EVERY,
        STEPS,
    }
    for step in (STEPS - EVERY, STEPS):
        assert_equal(mine[step], twins[step])


def assert_equal(one: Path, other: Path) -> None:
    """The parts of a checkpoint hold the same, bit for bit: weights, masters and moments."""
    import torch

    from relax_hpc.convert.torch_dist import StoredState

    both = StoredState(one), StoredState(other)
    shapes = {
        key: tuple(about.size) for key, about in both[0].tensors.items() if hasattr(about, "size")
    }
    assert any("exp_avg" in key for key in shapes)
    for key, shape in shapes.items():
        mine, twins = (stored.read(key, [0] * len(shape), shape) for stored in both)
        assert torch.equal(mine, twins), key
