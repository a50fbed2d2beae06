"""Controls of the runs with tools: what they answer in one episode they answer in another, whose
row says so."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.environments.base import (
    Beginning,
    Environment,
    MediaPart,
    Observation,
    Response,
    Step,
)
from relax_hpc.environments.with_tools import WithTools
from relax_hpc.environments.zoom import ZoomIn
from relax_hpc.examples.tasks.arithmetic import Arithmetic, problems
from relax_hpc.examples.tasks.fine_stripes import FineStripes, pictures


class _Exchanging(Environment):
    """Of an episode whose row has a column `exchanged`, each observation is the next one of
    that."""

    _others: Sequence[str] = ()

    def reset(self, beginning: Beginning) -> Sequence[Observation]:
        self._others = beginning.metadata.get("exchanged", ())
        return super().reset(beginning)

    def step(self, response: Response) -> Step:
        step = super().step(response)
        if not (self._others and step.observations):
            return step
        other = self._others[min(response.turn, len(self._others) - 1)]
        return replace(step, observations=(_observed(other),))


def _observed(other: str) -> Observation:
    if not other.startswith("data:"):
        return Observation(other)
    return Observation(media=(MediaPart("image", base64.b64decode(other.partition(",")[2])),))


class ExchangedTools(_Exchanging, WithTools): ...


class ExchangedZoom(_Exchanging, ZoomIn): ...


class ExchangedArithmetic(Arithmetic):
    """`exchanged` has the rows of `heldout`, each with the calculator's answers of the next one."""

    evaluations = ("heldout", "exchanged")
    environment = "tests.runs.exchanged:ExchangedTools"

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        if split != "exchanged":
            yield from super().rows(split, data)
            return
        drawn, rows = problems("heldout", data.digits), super().rows("heldout", data)
        next(drawn)
        for row, other in zip(rows, drawn, strict=False):
            yield row | {"exchanged": [other.result]}


class FewProblems(ExchangedArithmetic):
    """The same with fewer demonstrations, which take time to be read."""

    def demonstrations(
        self, data: DataConfig, tokenizer: Tokenizer, noise: float, seed: int
    ) -> Iterator[dict]:
        yield from islice(super().demonstrations(data, tokenizer, noise, seed), 1024)


class ExchangedStripes(FineStripes):
    """`exchanged` has the rows of `heldout`, each with the part that shows the tile of the next
    one."""

    evaluations = ("heldout", "exchanged")
    environment = "tests.runs.exchanged:ExchangedZoom"

    def rows(self, split: str, data: DataConfig) -> Iterator[dict[str, Any]]:
        if split != "exchanged":
            yield from super().rows(split, data)
            return
        drawn, rows = pictures("heldout"), super().rows("heldout", data)
        next(drawn)
        for row, other in zip(rows, drawn, strict=False):
            yield row | {"exchanged": [other.part(other.box)]}
