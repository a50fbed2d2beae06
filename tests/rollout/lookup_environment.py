"""An environment whose words and picture are those of files, which others may change meanwhile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relax_hpc.environments.base import (
    Beginning,
    Context,
    Environment,
    MediaPart,
    Observation,
    Response,
    Step,
)


class Lookup(Environment):
    """Says what its table has for each turn, and after the first one in a history of its own."""

    def __init__(self, table: str) -> None:
        self._table: dict[str, Any] = json.loads(Path(table).read_text())

    def reset(self, beginning: Beginning) -> Sequence[Observation]:
        picture = self._table["pictures"].get(beginning.answer)
        media = (MediaPart("image", Path(picture).read_bytes()),) if picture else ()
        return (Observation(f"{beginning.answer} {beginning.seed}.", media),)

    def step(self, response: Response) -> Step:
        said, done = (
            self._table["says"][response.turn],
            response.turn + 1 == len(self._table["says"]),
        )
        where = Context("other", turns=1) if response.turn == 0 and not done else None
        return Step(
            (Observation(said),),
            done,
            {"letters": len(response.text)},
            self._table["reward"],
            where,
        )
