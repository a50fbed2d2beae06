"""A small mixture of experts, rows with routes, and what Hugging Face's model computes by them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from relax_hpc.algorithms import Grpo
from relax_hpc.base.fields import FIELDS, ROUTES, declare_fields
from relax_hpc.base.routes import NAME, RouteShape
from relax_hpc.config.schema import ActorConfig, ModelConfig, RoutingReplay
from relax_hpc.queue.row_schema import Row
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch, collate
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.trainer import Trainer
from tests.helpers.engine_helpers import reference_model
from tests.helpers.training_helpers import ALGORITHM, rows, tiny_model

SHAPE = RouteShape(layers=2, experts=8, chosen=2)


@pytest.fixture(scope="module", name="declared")
def declared_fixture() -> Iterator[None]:
    """The table of fields as in a run with routing replay."""
    with declared():
        yield


@contextmanager
def declared() -> Iterator[None]:
    known = dict(FIELDS)
    declare_fields("model.routing_replay", (ROUTES,))
    yield
    FIELDS.clear()
    FIELDS.update(known)


def experts_model(root: Path) -> Path:
    """See SHAPE."""
    chosen = {
        "num_experts": SHAPE.experts,
        "num_experts_per_tok": SHAPE.chosen,
        "moe_intermediate_size": 16,
    }
    return tiny_model(root, tied=False, **chosen)


def drawn_routes(tokens: int, draw: np.random.Generator, shape: RouteShape = SHAPE) -> np.ndarray:
    """Any, of all tokens but the last."""
    orders = draw.random((tokens - 1, shape.layers, shape.experts)).argsort(-1)
    return np.concatenate([shape.pack(orders[..., : shape.chosen]), shape.without_routes(1)])


def routed_rows(count: int, seed: int = 0) -> list[Row]:
    """`training_helpers.rows` with routes that have nothing to do with their tokens."""
    draw = np.random.default_rng(seed + 100)
    return [row | {NAME: drawn_routes(len(row["token_ids"]), draw)} for row in rows(count, seed)]


def routed_policy(
    directory: Path, replay: RoutingReplay = "on", actor: ActorConfig | None = None
) -> PolicyModel:
    actor = actor or ActorConfig()
    settings = ModelConfig(routing_replay=replay)
    model = PolicyModel(read_config(directory), settings, actor.parallel, actor)
    model.load_hf(directory)
    return model


def routed_trainer(directory: Path, actor: ActorConfig, algorithm: Grpo = ALGORITHM) -> Trainer:
    return Trainer.from_settings(
        routed_policy(directory, actor=actor), algorithm, actor, temperature=0.9
    )


def routed_batch(samples: Sequence[Row], model: PolicyModel) -> Batch:
    return collate(samples, 0, "cpu", model.pack_split, model.row_fields)


@torch.no_grad()
def own_routes(directory: Path, token_ids: np.ndarray) -> np.ndarray:
    """As Hugging Face's model would have chosen, of all tokens but the last."""
    with chosen_routes(reference_model(directory), SHAPE) as found:
        reference_model(directory)(torch.from_numpy(token_ids.astype(np.int64))[None])
    return found()


@contextmanager
def chosen_routes(model: torch.nn.Module, shape: RouteShape) -> Iterator[Callable[[], np.ndarray]]:
    """Routes of all tokens but the last that Hugging Face's ``model`` chooses inside, once it has
    computed."""
    found: list[np.ndarray] = []
    with _hooked(model, lambda layer, output: found.append(output[2].numpy())):
        yield lambda: np.concatenate([shape.pack(np.stack(found, 1)[:-1]), shape.without_routes(1)])


@torch.no_grad()
def reference_logprobs(directory: Path, row: Row, temperature: float = 1.0) -> np.ndarray:
    """Of a row's tokens but the first, by Hugging Face's model, which is made to take the row's
    routes."""

    def forced(layer: int, output: tuple) -> tuple:
        logits, scores, own = output
        given = torch.from_numpy(row[NAME][:, layer, :, 0].astype(np.int64))
        # The last token has none.
        given[-1] = own[-1]
        chosen = logits.float().softmax(-1).gather(-1, given)
        return logits, (chosen / chosen.sum(-1, keepdim=True)).to(scores.dtype), given

    ids = torch.from_numpy(row["token_ids"].astype(np.int64))[None]
    with _hooked(reference_model(directory), forced):
        logits = reference_model(directory)(ids).logits[0, :-1]
    return (logits / temperature).log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].numpy()


@contextmanager
def _hooked(model: torch.nn.Module, hook: Any) -> Iterator[None]:
    layers = getattr(model.model, "language_model", model.model).layers
    handles = [
        layer.mlp.gate.register_forward_hook(lambda *about, n=number: hook(n, about[-1]))
        for number, layer in enumerate(layers)
    ]
    yield
    for handle in handles:
        handle.remove()
