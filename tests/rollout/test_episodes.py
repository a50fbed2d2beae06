"""Episodes of one row or several, and their tokens that the policy has not sampled: advantages,
losses and versions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from itertools import chain, pairwise
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
    """A row with random values. Its two middle tokens are not sampled, and some further ones."""
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


def split_episode(row: Row, pieces: int) -> list[Row]:
    """``row`` as several rows of the same episode, split at tokens that are not sampled. Values of
    the whole row are copied to each."""
    length = len(row["token_ids"])
    ends = [0, *{1: [], 2: [length // 2], 3: [2, length // 2]}[pieces], length]
    ticket, episode, _ = parse_row_id(row["row_id"])
    rows = []
    for number, (start, end) in enumerate(pairwise(ends)):
        piece = {
            name: value[start:end] if isinstance(value, np.ndarray) else value
            for name, value in row.items()
        }
        rows.append(
            {
                **piece,
                "row_id": row_id(ticket, episode, number),
                "prompt_len": 2 if start == 0 else 1,
            }
        )
    return rows


groups = st.lists(st.integers(1, 3), min_size=2, max_size=4).flatmap(
    lambda pieces: st.tuples(st.just(pieces), st.integers(0, 2**31))
)


def whole_and_split(pieces: Sequence[int], seed: int) -> tuple[list[Row], list[Row]]:
    """Rows of two prompts with an episode for each number in ``pieces``, and the same rows with each
    episode split into that number of rows."""
    whole, split_rows = list[Row](), list[Row]()
    for ticket, (k, count) in itertools.product((4, 5), enumerate(pieces)):
        row = row_of(row_id(ticket, k), seed + 10 * ticket + k)
        whole.append(row)
        split_rows += split_episode(row, count)
    return whole, split_rows


def test_rows_are_nested_by_their_ids() -> None:
    whole, split_rows = whole_and_split([1, 2, 3], seed=0)
    prompts = nest_rows(split_rows)
    assert [[len(episode) for episode in prompt] for prompt in prompts] == [[1, 2, 3]] * 2
    assert [*chain.from_iterable(chain.from_iterable(prompts))] == split_rows
    assert [[len(episode) for episode in prompt] for prompt in nest_rows(whole)] == [[1, 1, 1]] * 2


# -- advantages ------------------------------------------------------------------------------------


def test_an_episodes_reward_counts_once_and_all_of_its_rows_have_its_advantage() -> None:
    """Rewards 0, 1, 5 of episodes of 1, 2 and 3 rows: deviations -2, -1, 3, unbiased variance 7."""
    _, rows = whole_and_split([1, 2, 3], seed=1)
    for row in rows:
        row["reward"] = (0.0, 1.0, 5.0)[parse_row_id(row["row_id"])[1]]
    expected = {
        "grpo": np.array([-2, -1, 3]) / 7**0.5,
        "dr_grpo": np.array([-2, -1, 3]),
        "rloo": np.array([-3, -1.5, 4.5]),
    }
    for name, values in expected.items():
        fields = advantages_of(rows, ALGORITHMS[name](), seed=0)
        assert [field["row_id"] for field in fields] == [row["row_id"] for row in rows]
        for field, row in zip(fields, rows, strict=True):
            value = values[parse_row_id(row["row_id"])[1]]
            assert field["advantages"] == pytest.approx(value * row["loss_mask"], rel=1e-6)


def joined_advantages(rows: list[Row], algorithm: Algorithm) -> np.ndarray:
    """Advantages of all tokens of ``rows``: [tokens]."""
    fields = advantages_of(rows, algorithm, seed=3)
    return np.concatenate([field["advantages"] for field in fields])


@settings(max_examples=40, deadline=None)
@given(
    groups,
    st.sampled_from([name for name, kind in ALGORITHMS.items() if not kind.sequences]),
    st.booleans(),
)
def test_advantages_do_not_depend_on_the_split_of_an_episode(
    group, name: str, shuffle: bool
) -> None:
    whole, split_rows = whole_and_split(*group)
    algorithm = ALGORITHMS[name](shuffle_rewards=shuffle)
    assert np.array_equal(
        joined_advantages(split_rows, algorithm), joined_advantages(whole, algorithm)
    )


@settings(max_examples=20, deadline=None)
@given(groups)
def test_a_penalty_in_the_reward_counts_for_earlier_rows_of_the_episode_too(group) -> None:
    algorithm = ReinforcePP(kl_in_reward=0.2)
    whole, split_rows = whole_and_split(*group)
    advantages = joined_advantages(split_rows, algorithm)
    assert np.array_equal(advantages, joined_advantages(whole, algorithm)) and advantages.any()


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

    advantages = advantages_of(rows, algorithm, seed=0)
    rows = [row | fields for row, fields in zip(rows, advantages, strict=True)]
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
def test_losses_do_not_depend_on_the_split_of_an_episode(
    group, name: str, reduction, kl: KlConfig, batches: int
) -> None:
    algorithm = ALGORITHMS[name](reduction=reduction, kl=kl)
    whole, split_rows = whole_and_split(*group)
    expected, slopes = losses(whole, algorithm, 1)
    sums, split_slopes = losses(split_rows, algorithm, batches)
    assert sums == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert split_slopes == pytest.approx(slopes, rel=1e-6, abs=1e-9)
    assert expected["episodes"] == len(whole)
    assert sums["episodes"] == pytest.approx(len(whole), rel=1e-6)


def trained_row(
    name: str, mask: np.ndarray, reward: float, old: np.ndarray, shift: float = 0.0
) -> Row:
    """A row of ticket 0. Its log-probabilities are ``shift`` above ``old``, and were ``shift`` below
    ``old`` when the engine sampled the tokens."""
    logprobs = {
        "logprobs": old + shift * mask,
        "old_logprobs": old,
        "rollout_logprobs": old - shift * mask,
    }
    row = {
        "row_id": name,
        "ticket": 0,
        "reward": reward,
        "loss_mask": mask,
        "token_ids": mask.astype(np.int32),
    }
    return row | logprobs


def test_a_sequence_mean_has_equal_weights_for_episodes() -> None:
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
    sums, slopes = losses(rows, ALGORITHMS["dr_grpo"](reduction="sequence_mean"), 2)
    assert sums["loss"] == pytest.approx(0.0) and sums["weight"] == 2.0, "1 + (1 + 3) / 4 * -1"
    assert slopes == pytest.approx([1.0, *[-0.25] * 4])
    sums, slopes = losses(rows, ALGORITHMS["dr_grpo"](), 2)
    assert (sums["loss"], sums["weight"]) == (
        pytest.approx(-3.0),
        5.0,
    ) and slopes == pytest.approx([1.0, *[-1.0] * 4])


def test_sequence_ratios_are_those_of_single_rows() -> None:
    """GSPO's ratio, and the correction of level `sequence`. Each row has another context."""

    def line(name: str, shift: float, reward: float) -> Row:
        mask, old = np.array([0, 1, 1], np.uint8), np.array([0.0, -1.0, -1.0])
        return trained_row(name, mask, reward, old, shift)

    rows = [
        line("000000000.00.00", 0.0, 0.0),
        line("000000000.01.00", 0.1, 1.0),
        line("000000000.01.01", -0.1, 1.0),
    ]
    off = CorrectionConfig(kind="off")
    sums, _ = losses(rows, Gspo(clip_low=1.0, clip_high=9.0, correction=off), 1)
    assert sums["ratio"] == pytest.approx(2 * (1 + np.exp(0.1) + np.exp(-0.1))), (
        "the rows of an episode must have separate ratios"
    )
    sums, _ = losses(rows, Grpo(correction=CorrectionConfig(level="sequence")), 1)
    assert sums["rollout_ratio_max"] == pytest.approx(np.exp(0.2))


# -- tokens that are not sampled -------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([None, 3, 4, 5]), max_size=12), st.integers(1, 3))
def test_tokens_that_are_not_sampled_have_no_version_and_no_length(
    numbers: list[int | None], prompt: int
) -> None:
    """The queue, the mask of older tokens and the metrics use only sampled tokens."""
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
    (summary,) = summarize_groups([row], ["token_ids", "token_versions"])
    assert summary["versions"] == sorted(expected)
    tally = StepTally()
    tally.add([row])
    assert tally.lengths == [len(drawn)]
    mask_older_tokens(row)
    assert row["loss_mask"].tolist() == [0] * prompt + [
        int(bool(drawn) and number == drawn[-1]) for number in numbers
    ]


# -- declared numbers of rows ---------------------------------------------------------------------


def test_a_prompt_group_is_complete_if_all_its_episodes_are(tmp_path: Path) -> None:
    """The rollout declares the number of rows of each episode. Other roles must add their fields to
    all of these rows."""
    run, config, version = make_run(tmp_path / "run"), small(groups=2), Version(1, 0)
    with in_thread(run, config), Roles(run, config, episodes=b"\2\1") as roles:
        roles.start()
        assert roles.admit(version) == [0, 1]
        whole = rows_of([0], version, episodes=b"\2\1")
        for lacks in (whole[:2], whole[1:], [whole[0], whole[0]], rows_of([0], version, samples=3)):
            assert roles["rollout"].put_generated(lacks) == {0: "incomplete"}
            assert roles.admit(version, 1) == [0], "the whole ticket must be generated again"
        assert (
            roles["rollout"].put_generated([*rows_of([1], version, episodes=b"\1\3"), *whole[::-1]])
            == {}
        )
        claim = roles["reference"].claim("reference", BUDGET)
        names = [row["row_id"] for row in roles["reference"].rows(claim)]
        assert names == [*row_ids(0, b"\2\1"), *row_ids(1, b"\1\3")] == claim.row_ids()
        scored = [{"row_id": name, "ref_logprobs": np.zeros(5, np.float32)} for name in names]
        assert roles["reference"].put(scored[1:], ("ref_logprobs",), claim) == {0: "incomplete"}
        claim = roles["reference"].claim("reference", BUDGET)
        assert claim.tickets == (0,)
        assert roles["reference"].put(scored[:3], ("ref_logprobs",), claim) == {}
        assert roles["rollout"].connection.call("status")["dropped"] == {"incomplete": 4 * 2}, (
            "a dropped group counts one row per episode"
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
    ("rows", "expected"),
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
def test_an_invalid_episode_fails_its_prompt_group(rows, expected: str) -> None:
    class InvalidEpisodes(Task):
        async def episode(self, request: GenerateRequest, ask: object) -> Episode:
            generations = [
                row and Generation(row[0], row[2], np.array(row[1], np.int32), "stop")
                for row in rows
            ]
            return Episode([EpisodeRow((1,), generation) for generation in generations])

    request = GenerateRequest((1,), "p", 0, Sampling(1.0, 1.0, (), 0), 4)
    answer = asyncio.run(play(InvalidEpisodes(), request, lambda request: None))
    assert isinstance(answer, BadAnswer) and expected in str(answer)


class Letters:
    """A tokenizer whose tokens are letters. Token 25 ends a response."""

    eos_ids = frozenset({25})

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(97 + each) for each in ids)


def test_a_reward_gets_all_rows_of_an_episode() -> None:
    def generation(token_ids: list[int], finish: str) -> Generation:
        return Generation(
            token_ids, [0.0] * len(token_ids), np.ones(len(token_ids), np.int32), finish
        )

    prompt = Prompt("p", (1, 2), "2+2?", "4", {"level": 3})
    first, last = (
        EpisodeRow((1, 2), generation([3, 25], "stop")),
        EpisodeRow((1, 4), generation([5, 6], "length")),
    )
    inputs = reward_input(prompt, Episode([first, last]), Letters())
    assert inputs.rows == [["bc", "d"], ["be", "fg"]] and inputs.response_text == "fg"
    assert (inputs.prompt, inputs.answer, inputs.finish_reason, inputs.metadata) == (
        "2+2?",
        "4",
        "length",
        {"level": 3},
    )
    for answer in (Episode([first]), first.generation):
        inputs = reward_input(prompt, answer, Letters())
        assert (inputs.response_text, inputs.rows, inputs.finish_reason) == ("d", [], "stop")


def test_an_episode_becomes_rows_with_one_reward() -> None:
    def generation(versions: list[int]) -> Generation:
        logprobs = [-0.5 if version else 0.0 for version in versions]
        return Generation([7] * len(versions), logprobs, np.array(versions, np.int32), "length")

    prompt = Prompt("p", (1, 2, 3), "2+2?", "4")
    answers = [
        generation([9, 9]),
        Episode(
            [EpisodeRow((1, 2, 3), generation([9, 0, 8])), EpisodeRow((4,), generation([0, 9]))]
        ),
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
        "a filter must get each reward once"
    )
    assert generated_metrics([rows, failure]) == {GENERATED: 4.0, GENERATED_SUM: 3.0}
