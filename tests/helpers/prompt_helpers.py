"""All prompts of a file at once, as whoever has no index would read them."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.data.prompt_file import open_prompts
from relax_hpc.data.prompts import Prompt, PromptRules, parse_rows
from relax_hpc.data.row_files import DataSet
from relax_hpc.data.rows import BadLine, read_rows
from relax_hpc.data.tokenizer import Tokenizer


def read_prompts(
    path: Path, tokenizer: Tokenizer, how: PromptRules
) -> tuple[list[Prompt], list[BadLine]]:
    """The prompts, tokens included, and the lines that are none."""
    with how.rendering():
        found = list(parse_rows(read_rows(path), tokenizer, how))
    return [one for one in found if isinstance(one, Prompt)], [
        one for one in found if isinstance(one, BadLine)
    ]


def load_prompts(
    path: Path, tokenizer: Tokenizer, how: PromptRules, share: float
) -> tuple[list[Prompt], list[BadLine]]:
    """By an index that is made for it, which must come to the same. ConfigError: as
    `open_prompts`."""
    where = path.with_suffix(".index")
    where.unlink(missing_ok=True)
    with how.rendering():
        made, again = (open_prompts(path, where, tokenizer, how, share) for _ in range(2))
        found = list(made), made.bad
        assert (again[:], again.bad) == found == read_prompts(path, tokenizer, how)
    return found


def row_set(path: Path | str) -> DataSet:
    """The rows at ``path``, as a set that a configuration names."""
    return DataSet("data.train", "train", str(path))
