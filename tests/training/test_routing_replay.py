"""Tokens are computed by the experts that their routes say, in every pass; routes of others are
found."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_hpc.base.routes import NAME, RouteShape
from relax_hpc.queue.row_schema import Row
from relax_hpc.training.route_agreement import RouteAgreement
from tests.helpers.routes_helpers import (  # noqa: F401
    SHAPE,
    declared_fixture,
    drawn_routes,
    experts_model,
    own_routes,
    reference_logprobs,
    routed_batch,
    routed_policy,
    routed_rows,
    routed_trainer,
)
from tests.helpers.training_helpers import LR, actor_settings, inner_roles, one_rank_fixture  # noqa: F401

pytestmark = pytest.mark.usefixtures("one_rank", "declared")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return experts_model(tmp_path_factory.mktemp("experts"))


def test_log_probabilities_are_those_of_the_experts_that_were_chosen(directory: Path) -> None:
    """Against Hugging Face's model, made to take the same routes; rows of a pack have each its
    own."""
    samples, model = routed_rows(3), routed_policy(directory)
    scored = [
        {name: value for name, value in row.items() if name != "loss_mask"} for row in samples
    ]
    found = model.forward_logprobs([routed_batch(scored, model)], 0.9)
    for row, values in zip(samples, found, strict=True):
        np.testing.assert_allclose(values[1:], reference_logprobs(directory, row, 0.9), atol=1e-5)
    recorded = routed_policy(directory, "record")
    batch = routed_batch(scored, recorded)
    own = recorded.forward_logprobs([batch], 0.9)
    for row, values in zip(samples, own, strict=True):
        free = reference_logprobs(
            directory, row | {NAME: own_routes(directory, row["token_ids"])}, 0.9
        )
        np.testing.assert_allclose(values[1:], free, atol=1e-5)
    assert max(np.abs(one - other).max() for one, other in zip(found, own, strict=True)) > 0.1


def test_what_is_computed_again_takes_the_same_routes(directory: Path) -> None:
    """Whatever is recomputed, and however rows are divided: the routes are those of the
    micro-batch."""
    samples, norms = routed_rows(6), {}
    for recompute in ("none", "selective", "full"):
        for size in (6, 2):
            ours = routed_trainer(directory, actor_settings(recompute=recompute))
            parts = [samples[start : start + size] for start in range(0, 6, size)]
            batches = [routed_batch(part, ours.model) for part in parts]
            # A micro-batch's backward pass comes after the forward pass of another one, as in a
            # pipeline.
            losses = [
                ours._loss_of(batch, ours.model.hidden(batch, ours.module)) for batch in batches
            ]
            for loss, _, metrics in losses:
                loss.backward()
                ours._sums.add(metrics)
            norms[recompute, size] = ours.step(LR)["grad_norm"]
    plain = routed_trainer(directory, actor_settings())
    plain.accumulate([routed_batch(samples, plain.model)])
    assert plain.step(LR)["grad_norm"] == pytest.approx(norms["none", 6], rel=1e-5)
    assert all(norm == pytest.approx(norms["none", 6], rel=1e-5) for norm in norms.values()), norms
    free = routed_trainer(directory, actor_settings())
    free.accumulate([routed_batch([row | {NAME: None} for row in samples], free.model)])
    assert free.step(LR)["grad_norm"] != pytest.approx(norms["none", 6], rel=1e-2)


def test_the_reference_inside_of_the_actor_takes_no_routes(directory: Path) -> None:
    model = routed_policy(directory)
    inner, batch = inner_roles(model), routed_batch(routed_rows(2), model)
    inner.begin_step()
    inner.score(1, [batch])
    # Both have the present weights.
    free = model.batch_logprobs([batch], 0.9, routed=False)[0]
    assert torch.equal(batch.fields["ref_logprobs"], free)
    assert (batch.fields["old_logprobs"] - free).abs().max() > 0.1


def test_bytes_of_routes() -> None:
    wide = RouteShape(layers=1, experts=400, chosen=2)
    numbers = np.array([[[399, 7]], [[1, 256]]])
    assert wide.pack(numbers).tolist() == [[[[143, 1], [7, 0]]], [[[1, 0], [0, 1]]]]
    row = {
        "token_ids": np.zeros(3, np.int32),
        NAME: np.concatenate([wide.pack(numbers), wide.without_routes(1)]),
    }
    assert wide.find_fault(row) == ""
    with pytest.raises(ValueError, match="experts 7 to 400, allowed 0 to 399"):
        wide.pack(np.array([[[400, 7]]]))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda routes: None, "missing; the engine gave none"),
        (lambda routes: routes[:-1], r"found uint8 \[4, 2, 2, 1\], expected uint8 \[5, 2, 2, 1\]"),
        (lambda routes: routes[:, :1], r"found uint8 \[5, 1, 2, 1\]"),
        (lambda routes: routes[:, :, :1], r"found uint8 \[5, 2, 1, 1\]"),
        (lambda routes: routes.astype(np.int32), r"found int32 \[5, 2, 2, 1\]"),
        (lambda routes: routes.tolist(), "found list"),
        (
            lambda routes: np.where(routes == routes[3, 1, 0], 9, routes),
            r"found experts \[.*9.*\] of token",
        ),
        (lambda routes: routes[:, :, [0, 0]], r"found experts \[(\d), \1\] of token 0 in layer 0"),
        (
            lambda routes: np.roll(routes, 1, 0),
            "found no route of token 0 in layer 0, expected 2 different ones of 8",
        ),
    ],
)
def test_routes_that_are_none_are_told(change, says: str) -> None:
    row = {"token_ids": np.zeros(5, np.int32), NAME: drawn_routes(5, np.random.default_rng(0))}
    assert SHAPE.find_fault(row) == ""
    assert re.search(says, SHAPE.find_fault(row | {NAME: change(row[NAME])}))


LONG = 80
"""Tokens of a row, several stretches."""


@pytest.fixture(scope="module")
def long_rows(directory: Path) -> list[Row]:
    """Two, with the routes that their tokens have."""
    draw, found = np.random.default_rng(5), []
    for length in (LONG, 13):
        ids = draw.integers(3, 64, length).astype(np.int32)
        found.append({"token_ids": ids, NAME: own_routes(directory, ids)})
    return found


@pytest.fixture(scope="module")
def watched(directory: Path):
    model = routed_policy(directory)

    def shares(samples: list[Row]) -> np.ndarray:
        batch = routed_batch(samples, model)
        model.forward_logprobs([batch], 1.0)
        found = RouteAgreement([len(row["token_ids"]) for row in samples])
        found.add(batch, range(len(samples)), model.pack_split, model.router_tokens(batch))
        return found.shares()

    return shares


def shifted(routes: np.ndarray, start: int, stop: int, by: int) -> np.ndarray:
    """Those of the tokens from ``start`` to ``stop`` stand ``by`` tokens too far behind."""
    moved = routes.copy()
    moved[start:stop] = np.roll(routes[start:stop], by, axis=0)
    return moved


def test_routes_of_the_tokens_themselves_are_the_trainers_own(watched, long_rows) -> None:
    assert (watched(long_rows) > 0.95).all()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_routes_that_are_shifted_anywhere_are_found(watched, long_rows, data) -> None:
    """By a token, by a turn, in a turn alone, as if a prompt's token were missing, or of another
    row."""
    whole, other = long_rows
    start = data.draw(st.integers(0, LONG - 1 - 32), label="first token")
    stop = data.draw(st.integers(start + 32, LONG - 1), label="behind the last")
    by = data.draw(st.integers(1, 31), label="tokens")
    wrong = whole | {NAME: shifted(whole[NAME], start, stop, data.draw(st.sampled_from([by, -by])))}
    shares = watched([other, wrong])
    assert shares[0] > 0.95 and shares[1] < 0.5, shares
    short = other | {NAME: shifted(other[NAME], 0, 12, by % 11 + 1)}
    assert watched([short])[0] < 0.5
