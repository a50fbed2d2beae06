"""Pictures in the observations of an episode: their tokens, rows and branches."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from relax_hpc.config.schema import EnvironmentConfig
from relax_hpc.data.media import PlaceholderTokens, PromptMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.prompts import Prompt
from relax_hpc.environments.base import Context, MediaPart
from relax_hpc.queue.row_schema import Row
from relax_hpc.rollout.engines.engine import Episode
from relax_hpc.rollout.episodes.history import History
from relax_hpc.rollout.episodes.player import EnvironmentBackend, Player
from relax_hpc.rollout.episodes.turn_tokens import TurnTokenizer
from relax_hpc.rollout.episodes.turns import TurnRules
from relax_hpc.rollout.rows import group_rows
from tests.helpers.turn_episodes import BUDGET, PROMPT, TEMPLATE, TOKENIZER, ListedContexts
from tests.helpers.turn_episodes import template_process as template_process
from tests.helpers.turns_helpers import DeterministicEngine, InProcessEnvironments, start

PICTURE = TOKENIZER.encode("<|image_pad|>", False, True)[0]
TOKENS_OF_A_PICTURE = 3


class NumberedPictures:
    """Replaces `ObservedMedia`: each picture has some tokens and a blob with a number."""

    def __init__(self) -> None:
        self.count = 0

    async def expand(self, ticket: int | None, ids: list[int], media_parts: Sequence[MediaPart]):
        expanded, media = list[int](), list[PromptMedium]()
        for token in ids:
            if token != PICTURE:
                expanded.append(token)
                continue
            span = (len(expanded), TOKENS_OF_A_PICTURE)
            media.append(PromptMedium(Kind.IMAGE, b"", (span,), Path(f"picture-{self.count}")))
            expanded += [PICTURE] * TOKENS_OF_A_PICTURE
            self.count += 1
        return expanded, tuple(media)


def rows_with_pictures(*contexts: Context | None, pictured: Sequence[int]) -> list[Row]:
    """Rows of an episode whose environment shows pictures."""
    bridge = TurnTokenizer(TOKENIZER, TEMPLATE, {Kind.IMAGE: PlaceholderTokens(PICTURE)})
    rules = TurnRules(bridge, TOKENIZER, EnvironmentConfig(), NumberedPictures())
    playing = Player(
        EnvironmentBackend(
            InProcessEnvironments(lambda: ListedContexts(*contexts, pictured=pictured)), rules
        ),
        0,
        60.0,
        lambda fault: None,
    )
    episode = asyncio.run(
        playing.play(History(), start(TOKENIZER, DeterministicEngine(TOKENIZER), PROMPT, BUDGET))
    )
    assert isinstance(episode, Episode), episode
    return group_rows(
        Prompt("p", tuple(episode.rows[0].prompt), "go", "answer"), 3, [episode], [0.5]
    )


def pictures(row: Row) -> list[str]:
    """Ids of the pictures of a row. Checks that their spans are exactly the picture tokens."""
    covered = np.zeros(len(row["token_ids"]), bool)
    for span in row["spans"]:
        covered[span["start"] : span["start"] + span["length"]] = True
    assert np.array_equal(covered, row["token_ids"] == PICTURE), (
        "spans must cover all picture tokens"
    )
    return [span["media_id"] for span in row["spans"]]


def test_spans_of_pictures_in_later_observations_are_those_of_their_tokens() -> None:
    (row,) = rows_with_pictures(None, None, None, pictured=(0, 2))
    assert pictures(row) == ["picture-0", "picture-1"]


@pytest.mark.parametrize(("turns", "kept"), [(1, []), (2, ["picture-0"])])
def test_a_branch_keeps_the_pictures_of_its_turns(turns: int, kept: list[str]) -> None:
    whole, branch = rows_with_pictures(None, None, Context("branch", turns), pictured=(0, 1, 2))
    assert pictures(whole) == ["picture-0", "picture-1"] and pictures(branch) == [
        *kept,
        "picture-2",
    ]
