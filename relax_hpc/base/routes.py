"""Routes: the experts of each layer that a token goes to, as rows carry it from the engine to the
trainer, a byte a choice.

A token's route is that of the forward pass that first read it: of a sampled token the step that was
fed with it, of a prompt's the first prefill. Nothing is fed with the last token of a sequence,
which has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_hpc.base.fields import ROUTES

NAME, NONE = ROUTES.name, int(ROUTES.pad)
"""Name of the field, and what is in every byte of a token without a route, as which no route looks:
its experts differ."""

BAD_ROUTES, OTHER_ROUTES = "bad_routes", "other_routes"
"""Reasons for which a prompt group is dropped: its routes are no routes of the model, or other than
the trainer's."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Shape of the routes of a model's tokens: uint8 [tokens, layers, chosen, width]."""

    layers: int
    experts: int
    """Experts of a layer."""
    chosen: int
    """Experts of these that take a token."""

    @property
    def width(self) -> int:
        """Bytes of an expert's number, the low one first.

        >>> [RouteShape(2, experts, 8).width for experts in (128, 256, 257)], RouteShape(2, 256,
        ...     1).width
        ([1, 1, 2], 2)
        """
        return 1 if self.experts <= NONE or (self.experts == NONE + 1 and self.chosen > 1) else 2

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """Shape of one token's routes."""
        return self.layers, self.chosen, self.width

    def pack(self, numbers: np.ndarray) -> np.ndarray:
        """Numbers of experts [tokens, layers, chosen], of any type, as bytes. ValueError: one is
        out of range."""
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.experts:
            raise ValueError(
                f"experts {numbers.min()} to {numbers.max()}, allowed 0 to {self.experts - 1}"
            )
        narrow = np.ascontiguousarray(numbers, "u1" if self.width == 1 else "<u2")
        return narrow.view(np.uint8).reshape(-1, *self.token_shape)

    def without_routes(self, tokens: int) -> np.ndarray:
        """Bytes of so many ``tokens`` without a route."""
        return np.full((tokens, *self.token_shape), NONE, np.uint8)

    def find_fault(self, row: Mapping[str, Any]) -> str:
        """Fault of the routes of a row, in words; empty: each of its tokens but the last has one of
        this shape."""
        routes, tokens = row.get(NAME), len(row["token_ids"])
        if routes is None:
            return f"{NAME}: missing; the engine gave none"
        expected = (tokens, *self.token_shape)
        if (
            not isinstance(routes, np.ndarray)
            or routes.dtype != np.uint8
            or routes.shape != expected
        ):
            return f"{NAME}: found {_described(routes)}, expected uint8 {list(expected)}"
        numbers = np.ascontiguousarray(routes[:-1]).view("u1" if self.width == 1 else "<u2")[..., 0]
        ordered = np.sort(numbers, axis=-1)
        wrong = (ordered[..., -1] >= self.experts) | (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        if not wrong.any():
            return ""
        token, layer = np.argwhere(wrong)[0]
        found = (
            "no route"
            if (routes[token] == NONE).all()
            else f"experts {numbers[token, layer].tolist()}"
        )
        allowed = f"{self.chosen} different ones of {self.experts}"
        return f"{NAME}: found {found} of token {token} in layer {layer}, expected {allowed}"


def _described(routes: Any) -> str:
    return (
        f"{routes.dtype} {list(routes.shape)}"
        if isinstance(routes, np.ndarray)
        else type(routes).__name__
    )
