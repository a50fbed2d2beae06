"""Routes: the experts of each layer that process a token, from the engine to the trainer.

A row has one byte (or two, see `RouteShape.width`) for each chosen expert. The route of a token is
that of the forward pass that first processed it: for a sampled token the following decode step, for
a token of the prompt the first prefill. The last token of a sequence is never processed, so it has
no route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from relax_hpc.base.fields import ROUTES

NAME, NONE = ROUTES.name, int(ROUTES.pad)
"""Name of the field, and the value of all bytes of a token without a route. No route has this value
in all bytes, because its experts differ."""

BAD_ROUTES, OTHER_ROUTES = "bad_routes", "other_routes"
"""Reasons for which a prompt group is dropped: its routes are invalid for the model, or they differ
from the trainer's."""


@dataclass(frozen=True, slots=True)
class RouteShape:
    """Shape of the routes of a model's tokens: uint8 [tokens, layers, chosen, width]."""

    layers: int
    experts: int
    """Experts of a layer."""
    chosen: int
    """Experts of a layer that process a token."""

    @property
    def width(self) -> int:
        """Bytes of an expert's number, in little-endian order.

        >>> [RouteShape(2, experts, 8).width for experts in (128, 256, 257)], RouteShape(2, 256,
        ...     1).width
        ([1, 1, 2], 2)
        """
        return 1 if self.experts <= NONE or (self.experts == NONE + 1 and self.chosen > 1) else 2

    @property
    def token_shape(self) -> tuple[int, int, int]:
        """Shape of one token's route."""
        return self.layers, self.chosen, self.width

    def pack(self, numbers: np.ndarray) -> np.ndarray:
        """Bytes of expert ``numbers`` [tokens, layers, chosen]. ValueError: one is out of range."""
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < self.experts:
            raise ValueError(
                f"experts {numbers.min()} to {numbers.max()}, allowed 0 to {self.experts - 1}"
            )
        narrow = np.ascontiguousarray(numbers, "u1" if self.width == 1 else "<u2")
        return narrow.view(np.uint8).reshape(-1, *self.token_shape)

    def without_routes(self, tokens: int) -> np.ndarray:
        """Bytes of ``tokens`` tokens without a route."""
        return np.full((tokens, *self.token_shape), NONE, np.uint8)

    def find_fault(self, row: Mapping[str, Any]) -> str:
        """Description of the error in the routes of a row. Empty: all tokens but the last have a
        valid route."""
        routes, tokens = row.get(NAME), len(row["token_ids"])
        if routes is None:
            return f"{NAME}: missing; the engine gave none"
        shape = (tokens, *self.token_shape)
        is_array = isinstance(routes, np.ndarray)
        if not is_array or routes.dtype != np.uint8 or routes.shape != shape:
            return f"{NAME}: found {_describe(routes)}, expected uint8 {list(shape)}"
        numbers = np.ascontiguousarray(routes[:-1]).view("u1" if self.width == 1 else "<u2")[..., 0]
        ordered = np.sort(numbers, axis=-1)
        is_unknown = ordered[..., -1] >= self.experts
        has_repeats = (ordered[..., 1:] == ordered[..., :-1]).any(-1)
        wrong = is_unknown | has_repeats
        if not wrong.any():
            return ""
        token, layer = np.argwhere(wrong)[0]
        if (routes[token] == NONE).all():
            description = "no route"
        else:
            description = f"experts {numbers[token, layer].tolist()}"
        allowed = f"{self.chosen} different ones of {self.experts}"
        return f"{NAME}: found {description} of token {token} in layer {layer}, expected {allowed}"


def _describe(routes: Any) -> str:
    if isinstance(routes, np.ndarray):
        return f"{routes.dtype} {list(routes.shape)}"
    return type(routes).__name__
