"""Routes in rows, logs and turns, and the refusal of routes that are invalid or of other tokens."""

from __future__ import annotations

import asyncio
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from relax_hpc.base.routes import BAD_ROUTES, NAME, OTHER_ROUTES, RouteShape
from relax_hpc.config.schema import Config
from relax_hpc.data.prompts import Prompt
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.client.claims import check_claim
from relax_hpc.queue.client.segments import START, join_segment
from relax_hpc.queue.row_schema import Row
from relax_hpc.roles.prefetch import Window
from relax_hpc.roles.route_watch import RouteWatch
from relax_hpc.roles.step_report import StepResult, StepTally, policy_values
from relax_hpc.rollout.attempt import Attempt, read_logged_episode
from relax_hpc.rollout.engines.engine import Draft, Generation
from relax_hpc.rollout.group_rewards import GroupRewards
from relax_hpc.rollout.outcomes import Failure
from relax_hpc.rollout.rows import rows_of as rows_of_answers
from relax_hpc.training.models.batches import collate_parts
from relax_hpc.training.models.packs import PackSplit
from relax_hpc.training.models.replay import Routes
from tests.helpers.queue_helpers import BUDGET, Roles, in_thread, make_run, rows_of, small
from tests.helpers.routes_helpers import declared_fixture, drawn_routes  # noqa: F401

pytestmark = pytest.mark.usefixtures("declared")

SHAPE = RouteShape(layers=2, experts=8, chosen=2)
WHOLE = PackSplit()
PROMPT = Prompt("p", (7, 8, 9), "text", "answer")


def routes(tokens: int, seed: int = 0) -> np.ndarray:
    """Random routes of ``tokens`` tokens that are not the last ones of their row."""
    return drawn_routes(tokens + 1, np.random.default_rng(seed), SHAPE)[:-1]


def answer(tokens: int = 4, **changes: np.ndarray) -> Generation:
    """A generation with routes. ``changes``: entries of its fields `extras` and `before`."""
    extras = {NAME: np.concatenate([routes(tokens - 1, 1), SHAPE.without_routes(1)])}
    before = {NAME: routes(3, 2)}
    generation = Generation(
        [5] * tokens, [-0.5] * tokens, np.full(tokens, 3, np.int32), "stop", extras, before
    )
    generation.extras = extras | changes.get("extras", {})
    generation.before = before | changes.get("before", {})
    return generation


def test_routes_of_prompt_and_response_are_in_the_row() -> None:
    generation = answer()
    (row,) = rows_of_answers(PROMPT, 4, {0: generation})
    assert SHAPE.find_fault(row) == ""
    assert np.array_equal(row[NAME][:3], generation.before[NAME]) and np.array_equal(
        row[NAME][3:], generation.extras[NAME]
    )


def test_each_token_of_a_log_has_its_first_route() -> None:
    """A segment ends with a token that has a route. The next segment begins after it."""
    attempt, whole = Attempt(4, 0, PROMPT, 1), answer(5)
    draft = attempt.drafts[0]
    draft.before = whole.before
    draft.add([5, 5], [-0.5] * 2, [3, 3], {NAME: whole.extras[NAME][:2]})
    (first,) = attempt.new_segments(True, 9)
    assert np.array_equal(first[NAME], np.concatenate([whole.before[NAME], whole.extras[NAME][:2]]))
    attempt.note_appended([first], False)
    draft.add([5], [-0.5], [3], {NAME: whole.extras[NAME][2:3]})
    (second,) = attempt.new_segments(True, 9)
    attempt.note_appended([second], False)
    assert second[START] == 2 and len(second[NAME]) == 1 and second["prompt_len"] == 0
    draft.ended = whole
    (last,) = attempt.new_segments(True, 9)
    row = join_segment(join_segment(first, second), last)
    assert SHAPE.find_fault(row) == "" and np.array_equal(row[NAME][3:], whole.extras[NAME])
    resumed = Attempt(
        4, 0, PROMPT, 1, {0: read_logged_episode([join_segment(first, second)], PROMPT)}
    )
    resumed_draft = resumed.request(0, None, 9).draft
    assert (
        np.array_equal(resumed_draft.before[NAME], whole.before[NAME])
        and len(resumed_draft.extras[NAME]) == 3
    )


def test_turns_have_the_routes_of_the_request_that_first_read_them() -> None:
    """The next request reads the last token of a turn and the observation. Earlier requests have
    read all tokens before them."""
    first, observation = answer(4), (1, 2)
    context_tokens = 3 + 4 + len(observation)
    second = Generation(
        [6, 6],
        [-0.1, -0.2],
        np.array([4, 4], np.int32),
        "stop",
        {NAME: np.concatenate([routes(1, 5), SHAPE.without_routes(1)])},
        {NAME: routes(context_tokens, 6)},
    )
    whole = first.concat_turns(observation, second)
    assert whole.token_ids == [5, 5, 5, 5, 1, 2, 6, 6] and whole.token_versions.tolist() == [
        3
    ] * 4 + [0, 0, 4, 4]
    assert whole.logprobs == [-0.5] * 4 + [0.0, 0.0, -0.1, -0.2] and whole.finish_reason == "stop"
    (row,) = rows_of_answers(PROMPT, 4, {0: whole})
    assert SHAPE.find_fault(row) == ""
    expected = [
        first.before[NAME],
        first.extras[NAME][:3],
        second.before[NAME][6:],
        second.extras[NAME],
    ]
    assert np.array_equal(row[NAME], np.concatenate(expected))
    assert Draft.from_response(whole).snapshot() is whole


@pytest.mark.parametrize(
    ("bad", "expected"),
    [
        (Generation([5], [-0.5], np.array([3], np.int32), "stop"), "missing; the engine gave none"),
        (
            answer(extras={NAME: answer(3).extras[NAME]}),
            r"found uint8 \[6, 2, 2, 1\], expected uint8 \[7, 2, 2, 1\]",
        ),
        (answer(before={NAME: routes(2)}), r"found uint8 \[6, 2, 2, 1\]"),
        (
            answer(extras={NAME: answer().extras[NAME].astype(np.int32)}),
            r"found int32 \[7, 2, 2, 1\]",
        ),
        (
            answer(before={NAME: np.full_like(routes(3), 9)}),
            "found experts .9, 9. of token 0 in layer 0",
        ),
    ],
)
def test_a_prompt_group_with_bad_routes_is_refused(bad: Generation, expected: str) -> None:
    """The group is counted by its reason, the message names the sample, and the role continues."""
    config = Config()
    config.rollout.reward = "answer_partial"

    class NumberTokens:
        eos_ids = (2,)

        def decode(self, ids: list[int]) -> str:
            return " ".join(map(str, ids))

    judging = GroupRewards(config, NumberTokens(), lambda *_: None, routes=SHAPE)
    good = asyncio.run(judging.rows(PROMPT, 4, [answer(), answer()]))
    assert len(good) == 2 and all(SHAPE.find_fault(row) == "" for row in good)
    failure = asyncio.run(judging.rows(PROMPT, 4, [answer(), bad]))
    assert isinstance(failure, Failure) and failure.reason == BAD_ROUTES
    assert re.search(rf"^bad_routes: 000000004\.01\.00: routed_experts: {expected}", failure.detail)


def put_with_routes(roles: Roles, tickets: list[int], version, tokens: int = 5) -> None:
    rows = rows_of(tickets, version)
    for row in rows:
        row[NAME] = np.concatenate(
            [routes(len(row["token_ids"]) - 1, row["ticket"]), SHAPE.without_routes(1)]
        )
    assert roles["rollout"].put_generated(rows) == {}
    roles["rollout"].settle()


def test_the_role_that_claims_rows_finds_routes_of_another_model(tmp_path) -> None:
    """A rollout with another model may put such routes. Roles without routes accept the rows."""
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = roles.admit(version)
        put_with_routes(roles, tickets, version)
        claim = roles["reference"].claim("reference", BUDGET)
        assert check_claim(roles["reference"], claim, None, SHAPE) and check_claim(
            roles["reference"], claim
        )
        other = RouteShape(layers=3, experts=8, chosen=2)
        assert not check_claim(roles["reference"], claim, None, other)
        dropped = roles["actor"].connection.call("status")["dropped"]
        assert dropped == {BAD_ROUTES: len(tickets) * config.samples_per_prompt}
        assert roles.admit(version) == tickets, "the tickets must be generated again"


def test_rows_with_routes_of_other_tokens_are_dropped_before_a_step(tmp_path, capsys) -> None:
    """The trainer has computed two prompt groups. One row has routes of other tokens."""
    run, config = make_run(tmp_path / "run"), small(2, 2)
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = roles.admit(version)
        put_with_routes(roles, tickets, version)
        roles.learn(version)
        assignment = {"ranks": 1, "max_tokens": 64, "batch": 0}
        claim = roles["actor"].claim("actor", BUDGET, config.prompts_per_step, **assignment)
        rows = roles["actor"].rows(claim)
        context = SimpleNamespace(config=config, client=roles["actor"])
        ranks = SimpleNamespace(control=RankChannel(10.0), layout=SimpleNamespace(data_rank=0))
        computed = [(Window(claim, rows), batches_of(rows, claim.assignment[0]))]
        whole = slice(None)
        model = SimpleNamespace(routed=True, pack_split=WHOLE, router_tokens=lambda _: whole)
        watch, tally = RouteWatch(context, ranks, model), StepTally()
        assert watch.agree(computed, tally)
        assert (
            policy_values(StepResult([{}], 1, counted(tally), 0.1, 1.0))["r3/routes_equal"] == 1.0
        )
        wrong = rows[-1]["row_id"]
        assert not watch.agree(
            [(computed[0][0], batches_of(rows, claim.assignment[0], wrong))], StepTally()
        )
        assert (
            f"quarantined: {wrong}: 0.000 of its routes are the trainer's own"
            in capsys.readouterr().out
        )
        assert roles["actor"].connection.call("status")["dropped"] == {
            OTHER_ROUTES: config.samples_per_prompt
        }
        assert roles.admit(version) == [int(wrong.partition(".")[0])]


def counted(tally: StepTally) -> StepTally:
    tally.rewards = [1.0]
    tally.lengths = [1]
    return tally


def batches_of(rows: list[Row], assignment: list[list[int]], wrong: str = "") -> list:
    """Batches after a forward pass. The routers agree with the engine except in the row ``wrong``."""
    batches = collate_parts(rows, assignment, "cpu", WHOLE, (NAME,))
    for batch, numbers in zip(batches, assignment, strict=True):
        batch.routes = Routes(batch.inputs[NAME][0], True)
        same = torch.cat(
            [torch.full((len(rows[n]["token_ids"]),), rows[n]["row_id"] != wrong) for n in numbers]
        )
        batch.routes.equal = dict.fromkeys(range(SHAPE.layers), same)
    return batches
