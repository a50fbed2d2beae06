"""Episodes of one row or several, and tokens in them that nobody sampled: advantages, losses,
versions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.algorithms import ALGORITHMS, Algorithm, Grpo, Gspo, ReinforcePP
from relax_hpc.algorithms.base import CorrectionConfig, KlConfig
from relax_hpc.base.errors import RefusedError
from relax_hpc.base.metrics.writer import GENERATED, GENERATED_SUM
from relax_hpc.base.versions import Version
from relax_hpc.data.prompts import Prompt
from relax_hpc.queue.client.summary import summarize_groups
from relax_hpc.queue.row_ids import parse_row_id, row_id, row_ids, ticket_of
from relax_hpc.queue.row_schema import Row, nest_rows, sampled_versions
from relax_hpc.roles.advantages import advantages_of
from relax_hpc.roles.step_report import StepTally
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Episode,
    EpisodeRow,
    GenerateRequest,
    Generation,
    Sampling,
)
from relax_hpc.rollout.episodes.play import play
from relax_hpc.rollout.outcomes import Failure, generated_metrics
from relax_hpc.rollout.rows import group_rows, mask_older_tokens, reward_input
from relax_hpc.tasks import Task
from tests.helpers.queue_helpers import BUDGET, Roles, in_thread, make_run, rows_of, small
from tests.requirements import requires

PER_TOKEN = [
    name for name, kind in ALGORITHMS.items() if name not in ("gspo", "m2po") and not kind.sequences
]


def row_of(name: str, seed: int, length: int = 12) -> Row:
    """A row two of whose tokens somebody else has put between those of the policy, and a boundary
    behind them."""
    draw = np.random.default_rng(seed)
    mask = (draw.random(length) < 0.7).astype(np.uint8)
    mask[[0, 1, length // 2 - 1, length // 2]] = 0
    mask[[2, -1]] = 1
    new = -draw.exponential(1.0, length)
    fields = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
    near = {field: new + draw.normal(0, 0.4, length) for field in fields}
    return {
        "row_id": name,
        "ticket": ticket_of(name),
        "token_ids": np.arange(length, dtype=np.int32),
        "prompt_len": 2,
        "loss_mask": mask,
        "token_versions": mask * np.int32(Version(1, 3).encode()),
        "reward": float(draw.integers(0, 4)),
        "finish_reason": "stop",
        "logprobs": new,
        **{field: values * mask for field, values in near.items()},
        "values": new / 3,
    }


def cut(row: Row, pieces: int) -> list[Row]:
    """``row`` as so many rows of the same episode, cut where nobody sampled; what is said of all of
    it stays."""
    length = len(row["token_ids"])
    ends = [0, *{1: [], 2: [length // 2], 3: [2, length // 2]}[pieces], length]
    ticket, episode, _ = parse_row_id(row["row_id"])
    rows = []
    for number, (start, end) in enumerate(pairwise(ends)):
        part = {
            name: value[start:end] if isinstance(value, np.ndarray) else value
            for name, value in row.items()
        }
        rows.append(
            {
                **part,
                "row_id": row_id(ticket, episode, number),
                "prompt_len": 2 if start == 0 else 1,
            }
        )
    return rows


groups = st.lists(st.integers(1, 3), min_size=2, max_size=4).flatmap(
    lambda pieces: st.tuples(st.just(pieces), st.integers(0, 2**31))
)


def whole_and_cut(pieces: Sequence[int], seed: int) -> tuple[list[Row], list[Row]]:
    """Two prompts of as many episodes as there are ``pieces``, and the same with each episode cut
    into so many."""
    whole = [row_of(row_id(t, k), seed + 10 * t + k) for t in (4, 5) for k in range(len(pieces))]
    return whole, [
        part for row, count in zip(whole, [*pieces] * 2, strict=True) for part in cut(row, count)
    ]


def test_rows_are_told_apart_by_their_ids() -> None:
    whole, parts = whole_and_cut([1, 2, 3], seed=0)
    assert [[len(episode) for episode in prompt] for prompt in nest_rows(parts)] == [[1, 2, 3]] * 2
    assert [row for prompt in nest_rows(parts) for episode in prompt for row in episode] == parts
    assert [[len(episode) for episode in prompt] for prompt in nest_rows(whole)] == [[1, 1, 1]] * 2


# -- advantages ------------------------------------------------------------------------------------


def test_an_episodes_reward_counts_once_and_all_of_its_rows_have_its_advantage() -> None:
    """Rewards 0, 1, 5 of episodes of 1, 2 and 3 rows: deviations -2, -1, 3, unbiased variance 7."""
    _, parts = whole_and_cut([1, 2, 3], seed=1)
    for row in parts:
        row["reward"] = (0.0, 1.0, 5.0)[parse_row_id(row["row_id"])[1]]
    expected = {
        "grpo": np.array([-2, -1, 3]) / 7**0.5,
        "dr_grpo": np.array([-2, -1, 3]),
        "rloo": np.array([-3, -1.5, 4.5]),
    }
    for name, values in expected.items():
        made = advantages_of(parts, ALGORITHMS[name](), seed=0)
        assert [one["row_id"] for one in made] == [row["row_id"] for row in parts]
        for one, row in zip(made, parts, strict=True):
            value = values[parse_row_id(row["row_id"])[1]]
            assert one["advantages"] == pytest.approx(value * row["loss_mask"], rel=1e-6)


@settings(max_examples=40, deadline=None)
@given(
    groups,
    st.sampled_from([name for name, kind in ALGORITHMS.items() if not kind.sequences]),
    st.booleans(),
)
def test_advantages_do_not_know_where_an_episode_was_cut(group, name: str, shuffle: bool) -> None:
    whole, parts = whole_and_cut(*group)
    algorithm = ALGORITHMS[name](shuffle_rewards=shuffle)
    found, expected = (advantages_of(rows, algorithm, seed=3) for rows in (parts, whole))
    assert np.array_equal(
        *(np.concatenate([row["advantages"] for row in made]) for made in (found, expected))
    )


@settings(max_examples=20, deadline=None)
@given(groups)
def test_a_penalty_in_the_reward_counts_for_earlier_rows_of_the_episode_too(group) -> None:
    algorithm = ReinforcePP(kl_in_reward=0.2)
    found, expected = (
        advantages_of(rows, algorithm, seed=3) for rows in reversed(whole_and_cut(*group))
    )
    made = [np.concatenate([row["advantages"] for row in rows]) for rows in (found, expected)]
    assert np.array_equal(*made) and made[0].any()


# -- losses ----------------------------------------------------------------------------------------


def losses(
    rows: list[Row], algorithm: Algorithm, batches: int
) -> tuple[dict[str, float], np.ndarray]:
    """Loss and metric sums over ``rows`` in micro-batches, in float64, and the gradient of each
    trained token."""
    requires("torch")
    import torch

    from relax_hpc.training.models.batches import collate, count_episode_tokens
    from relax_hpc.training.trainer import token_batch

    made = advantages_of(rows, algorithm, seed=0)
    rows = [row | one for row, one in zip(rows, made, strict=True)]
    counts, totals, slopes = count_episode_tokens(rows), dict[str, float](), dict[int, np.ndarray]()
    for first in range(batches):
        numbers = list(range(first, len(rows), batches))
        batch = collate(
            [rows[n] for n in numbers], 0, "cpu", episode_tokens=[counts[n] for n in numbers]
        )
        batch.fields = {name: value.double() for name, value in batch.fields.items()}
        logprobs = torch.zeros(batch.mask.shape, dtype=torch.float64)
        for line, n in zip(logprobs, numbers, strict=True):
            line[: len(rows[n]["logprobs"])] = torch.tensor(rows[n]["logprobs"])
        logprobs.requires_grad_()
        loss, metrics = algorithm.loss(token_batch(batch, logprobs, None))
        loss.backward()
        for name, value in {"loss": loss, **metrics}.items():
            both = totals.get(name, value.item() if name.endswith("_max") else 0.0), value.item()
            totals[name] = max(both) if name.endswith("_max") else sum(both)
        for line, n in zip(logprobs.grad, numbers, strict=True):
            slopes[n] = line[: len(rows[n]["token_ids"])][rows[n]["loss_mask"] > 0].numpy()
    return totals, np.concatenate([slopes[n] for n in range(len(rows))])


@settings(max_examples=60, deadline=None)
@given(
    groups,
    st.sampled_from(PER_TOKEN),
    st.sampled_from(["token_mean", "sequence_mean"]),
    st.sampled_from([KlConfig(), KlConfig(coefficient=0.1)]),
    st.integers(1, 3),
)
def test_losses_do_not_know_where_an_episode_was_cut(
    group, name: str, reduction, kl: KlConfig, batches: int
) -> None:
    algorithm = ALGORITHMS[name](reduction=reduction, kl=kl)
    whole, parts = whole_and_cut(*group)
    (expected, slopes), (found, cut_slopes) = (
        losses(whole, algorithm, 1),
        losses(parts, algorithm, batches),
    )
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert cut_slopes == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert expected["episodes"] == len(whole) and found["episodes"] == pytest.approx(
        len(whole), rel=1e-6
    )


def trained_row(
    name: str, mask: np.ndarray, reward: float, old: np.ndarray, shift: float = 0.0
) -> Row:
    """Of one prompt, whose log-probabilities are ``shift`` above ``old`` now, and were as far below
    when drawn."""
    logprobs = {
        "logprobs": old + shift * mask,
        "old_logprobs": old,
        "rollout_logprobs": old - shift * mask,
    }
    about = {
        "row_id": name,
        "ticket": 0,
        "reward": reward,
        "loss_mask": mask,
        "token_ids": mask.astype(np.int32),
    }
    return about | logprobs


def test_a_sequence_mean_weighs_episodes_and_not_rows() -> None:
    """Token losses -A r of an episode of 1 token and one of 1 + 3 in two rows, A = -+1 and r =
    1."""

    def line(name: str, trained: int, reward: float) -> Row:
        mask = np.array([0] + [1] * trained, np.uint8)
        return trained_row(name, mask, reward, -1.0 * mask)

    rows = [
        line("000000000.00.00", 1, 0.0),
        line("000000000.01.00", 1, 2.0),
        line("000000000.01.01", 3, 2.0),
    ]
    found, slopes = losses(rows, ALGORITHMS["dr_grpo"](reduction="sequence_mean"), 2)
    assert found["loss"] == pytest.approx(0.0) and found["weight"] == 2.0, "1 + (1 + 3) / 4 * -1"
    assert slopes == pytest.approx([1.0, *[-0.25] * 4])
    found, slopes = losses(rows, ALGORITHMS["dr_grpo"](), 2)
    assert (found["loss"], found["weight"]) == (
        pytest.approx(-3.0),
        5.0,
    ) and slopes == pytest.approx([1.0, *[-1.0] * 4])


def test_what_is_of_a_sequence_is_of_one_row() -> None:
    """GSPO's ratio, and the correction of level `sequence`: each row was drawn in a context of its
    own."""

    def line(name: str, shift: float, reward: float) -> Row:
        mask, old = np.array([0, 1, 1], np.uint8), np.array([0.0, -1.0, -1.0])
        return trained_row(name, mask, reward, old, shift)

    rows = [
        line("000000000.00.00", 0.0, 0.0),
        line("000000000.01.00", 0.1, 1.0),
        line("000000000.01.01", -0.1, 1.0),
    ]
    off = CorrectionConfig(kind="off")
    found, _ = losses(rows, Gspo(clip_low=1.0, clip_high=9.0, correction=off), 1)
    assert found["ratio"] == pytest.approx(2 * (1 + np.exp(0.1) + np.exp(-0.1))), (
        "not 1 for both rows of the episode"
    )
    found, _ = losses(rows, Grpo(correction=CorrectionConfig(level="sequence")), 1)
    assert found["rollout_ratio_max"] == pytest.approx(np.exp(0.2))


# -- tokens that nobody sampled --------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([None, 3, 4, 5]), max_size=12), st.integers(1, 3))
def test_what_nobody_sampled_has_no_version_and_no_length(
    numbers: list[int | None], prompt: int
) -> None:
    """Anywhere behind the prompt: the queue, the mask of older tokens and the metrics look at the
    others alone."""
    codes = [0] * prompt + [
        0 if number is None else Version(1, number).encode() for number in numbers
    ]
    versions = np.array(codes, np.int32)
    row: Row = {
        "row_id": row_id(7, 0),
        "token_ids": np.ones(len(codes), np.int32),
        "token_versions": versions,
        "prompt_len": prompt,
        "loss_mask": (versions > 0).astype(np.uint8),
        "reward": 1.0,
        "finish_reason": "stop",
    }
    drawn = [number for number in numbers if number is not None]
    expected = {Version(1, number).encode() for number in drawn}
    assert sampled_versions(row) == expected
    (told,) = summarize_groups([row], ["token_ids", "token_versions"])
    assert told["versions"] == sorted(expected)
    tally = StepTally()
    tally.add([row])
    assert tally.lengths == [len(drawn)]
    mask_older_tokens(row)
    assert row["loss_mask"].tolist() == [0] * prompt + [
        int(bool(drawn) and number == drawn[-1]) for number in numbers
    ]


# -- what is declared ------------------------------------------------------------------------------


def test_a_prompt_group_is_whole_when_each_of_its_episodes_is(tmp_path: Path) -> None:
    """Who generates it declares how many rows each has; whoever adds fields to it has to add them
    to all of these."""
    run, config, version = make_run(tmp_path / "run"), small(groups=2), Version(1, 0)
    with in_thread(run, config), Roles(run, config, episodes=b"\2\1") as roles:
        roles.start()
        assert roles.admit(version) == [0, 1]
        whole = rows_of([0], version, episodes=b"\2\1")
        for lacks in (whole[:2], whole[1:], [whole[0], whole[0]], rows_of([0], version, samples=3)):
            assert roles["rollout"].put_generated(lacks) == {0: "incomplete"}
            assert roles.admit(version, 1) == [0], "the ticket is drawn again, whole"
        assert (
            roles["rollout"].put_generated([*rows_of([1], version, episodes=b"\1\3"), *whole[::-1]])
            == {}
        )
        claim = roles["reference"].claim("reference", BUDGET)
        names = [row["row_id"] for row in roles["reference"].rows(claim)]
        assert names == [*row_ids(0, b"\2\1"), *row_ids(1, b"\1\3")] == claim.row_ids()
        made = [{"row_id": name, "ref_logprobs": np.zeros(5, np.float32)} for name in names]
        assert roles["reference"].put(made[1:], ("ref_logprobs",), claim) == {0: "incomplete"}
        (left,) = (claim := roles["reference"].claim("reference", BUDGET)).tickets
        assert left == 0 and roles["reference"].put(made[:3], ("ref_logprobs",), claim) == {}
        assert roles["rollout"].connection.call("status")["dropped"] == {"incomplete": 4 * 2}, (
            "one row an episode"
        )
        for name in ("7", "0.1", "0.0.x", "0.0.-1", "-1.0.0", 7):
            with pytest.raises(
                RefusedError, match=r"row_id: found .*, expected ticket.episode.row"
            ):
                roles["rollout"].put_generated([whole[0] | {"row_id": name}])
        with pytest.raises(RefusedError, match=r"found episode 70000, allowed: below 65536"):
            roles["rollout"].put_generated([whole[0] | {"row_id": row_id(0, 70_000)}])
        with pytest.raises(
            RefusedError, match=r"found an episode of 101 rows, allowed: at most 100"
        ):
            roles["rollout"].put_generated(
                [whole[0] | {"row_id": row_id(0, 0, row)} for row in range(101)]
            )


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ([], "found an episode of 0 rows, allowed 1 to 100"),
        ([([5], [0], [0.0])], "found no token that the policy has sampled"),
        (
            [([5, 6], [0, 9], [-1.0, -1.0])],
            "a log-probability other than 0 of a token that was not sampled",
        ),
        ([([5, 6], [9], [0.0, -1.0])], "found 1 versions for 2 tokens"),
        ([([5], [9], [float("nan")])], "nan_logprob"),
        ([None], "episode_exception: AttributeError"),
    ],
)
def test_an_episode_that_is_none_costs_its_prompt_group(rows, says: str) -> None:
    class Odd(Task):
        async def episode(self, request: GenerateRequest, ask: object) -> Episode:
            made = [
                row and Generation(row[0], row[2], np.array(row[1], np.int32), "stop")
                for row in rows
            ]
            return Episode([EpisodeRow((1,), one) for one in made])

    request = GenerateRequest((1,), "p", 0, Sampling(1.0, 1.0, (), 0), 4)
    found = asyncio.run(play(Odd(), request, lambda asked: None))
    assert isinstance(found, BadAnswer) and says in str(found)


class Spelled:
    """A tokenizer of which each token is a letter, and 25 the end."""

    eos_ids = frozenset({25})

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + each) for each in ids)


def test_a_reward_sees_all_rows_of_an_episode() -> None:
    def made(token_ids: list[int], finish: str) -> Generation:
        return Generation(
            token_ids, [0.0] * len(token_ids), np.ones(len(token_ids), np.int32), finish
        )

    prompt = Prompt("p", (1, 2), "2+2?", "4", {"level": 3})
    first, last = (
        EpisodeRow((1, 2), made([3, 25], "stop")),
        EpisodeRow((1, 4), made([5, 6], "length")),
    )
    seen = reward_input(prompt, Episode([first, last]), Spelled())
    assert seen.rows == [["bc", "d"], ["be", "fg"]] and seen.response_text == "fg"
    assert (seen.prompt, seen.answer, seen.finish_reason, seen.metadata) == (
        "2+2?",
        "4",
        "length",
        {"level": 3},
    )
    for one in (Episode([first]), first.generation):
        seen = reward_input(prompt, one, Spelled())
        assert (seen.response_text, seen.rows, seen.finish_reason) == ("d", [], "stop")


def test_an_episode_becomes_rows_with_one_reward() -> None:
    def made(versions: list[int]) -> Generation:
        logprobs = [-0.5 if version else 0.0 for version in versions]
        return Generation([7] * len(versions), logprobs, np.array(versions, np.int32), "length")

    prompt = Prompt("p", (1, 2, 3), "2+2?", "4")
    answers = [
        made([9, 9]),
        Episode([EpisodeRow((1, 2, 3), made([9, 0, 8])), EpisodeRow((4,), made([0, 9]))]),
    ]
    rows = group_rows(prompt, 6, answers, [1.0, 0.5])
    assert [row["row_id"] for row in rows] == row_ids(6, b"\1\2")
    assert [(row["ticket"], row["episode"], row["row"], row["reward"]) for row in rows] == [
        (6, 0, 0, 1.0),
        (6, 1, 0, 0.5),
        (6, 1, 1, 0.5),
    ]
    assert [row["loss_mask"].tolist() for row in rows] == [
        [0, 0, 0, 1, 1],
        [0, 0, 0, 1, 0, 1],
        [0, 0, 1],
    ]
    assert [row["prompt_len"] for row in rows] == [3, 3, 1] and rows[2]["token_ids"].tolist() == [
        4,
        7,
        7,
    ]
    newest = group_rows(prompt, 6, answers, [1.0, 0.5], newest_only=True)
    assert newest[1]["loss_mask"].tolist() == [0, 0, 0, 0, 0, 1]
    failure = group_rows(prompt, 6, answers, [1.0, 0.5], keeps=lambda rewards: len(rewards) != 2)
    assert isinstance(failure, Failure) and failure.rewards == (1.0, 0.5), (
        "a filter sees each reward once"
    )
    assert generated_metrics([rows, failure]) == {GENERATED: 4.0, GENERATED_SUM: 3.0}
