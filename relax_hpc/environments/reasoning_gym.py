"""The environment `reasoning_gym`: puzzles of the library reasoning_gym, which also scores the
answers.

`python -m relax_hpc.environments.reasoning_gym NAME SIZE [SEED]` prints prompts of one of its data
sets, one on each line.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments.base import Beginning, Environment, Observation, Response, Step
from relax_hpc.environments.tool_calls import read_turn

COLUMN = "puzzle"
"""Column of a prompt's row that identifies the puzzle."""
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_MAX_ERROR_CHARS = 200
"""Maximum length of an error in `info`."""


class ReasoningGym(Environment):
    """One puzzle. The answer is the text between the last `<answer>` and `</answer>`, or the whole
    response without these tags. Thoughts (`<think>`) are ignored. The reward is the best score of
    all attempts. An answer that the library cannot score has 0."""

    def __init__(self, attempts: int = 1) -> None:
        """``attempts``: maximum number of answers. ConfigError: the library is not installed."""
        library()
        self._left, self._best = attempts, 0.0

    def reset(self, beginning: Beginning) -> tuple[Observation, ...]:
        if COLUMN not in beginning.metadata:
            raise ValueError(
                f"the prompt's row has no column {COLUMN}; make rows by python -m {__name__}"
            )
        puzzle = beginning.metadata[COLUMN]
        self._set = data_set(puzzle["name"], puzzle["seed"], puzzle["size"])
        self._entry = self._set[puzzle["index"]]
        return ()

    def step(self, response: Response) -> Step:
        text = read_turn(response.text, response.in_thought).spoken
        answer = (_ANSWER.findall(text) or [text])[-1].strip()
        info: dict[str, Any] = {}
        try:
            self._best = max(self._best, float(self._set.score_answer(answer, self._entry)))
        except Exception as error:
            # Some data sets raise any error for an answer of an unexpected form.
            info["unjudged"] = f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]
        self._left -= 1
        done = self._best == 1.0 or self._left <= 0
        messages = () if done else (Observation("That is not right. Try again.", role="user"),)
        return Step(messages, done, {**info, "score": self._best}, self._best)


def rows_of(name: str, size: int, seed: int) -> Iterator[Mapping[str, Any]]:
    """Rows of prompts for ``size`` puzzles of a data set. ConfigError: the data set does not
    exist."""
    for index, entry in enumerate(data_set(name, seed, size)):
        puzzle = {"name": name, "seed": seed, "size": size, "index": index}
        answer = "" if entry["answer"] is None else entry["answer"]
        yield {
            "id": f"{name}-{seed}-{index}",
            "prompt": entry["question"],
            "answer": answer,
            COLUMN: puzzle,
        }


@functools.lru_cache(maxsize=64)
def data_set(name: str, seed: int, size: int) -> Any:
    """A data set of the library. ConfigError: it does not exist."""
    try:
        return library().create_dataset(name, seed=seed, size=size)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def library() -> Any:
    """The library, which is imported here because its import is slow. ConfigError: it is not
    installed."""
    try:
        import reasoning_gym
    except ImportError as error:
        raise ConfigError(
            f"environment.kind: reasoning_gym cannot be imported: {error}; pip install "
            "'relax_hpc[puzzles]'"
        ) from error
    return reasoning_gym


def main() -> None:
    """Print prompts."""
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: python -m {__spec__.name} NAME SIZE [SEED]")
    seed = int(sys.argv[3]) if len(sys.argv) == 4 else 0
    for row in rows_of(sys.argv[1], int(sys.argv[2]), seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
