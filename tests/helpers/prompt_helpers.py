"""All prompts of a file, read without an index and with one."""

from __future__ import annotations

from pathlib import Path

from relax_hpc.data.prompt_file import open_prompts
from relax_hpc.data.prompts import Prompt, PromptRules, parse_rows
from relax_hpc.data.row_files import DataSet
from relax_hpc.data.rows import BadLine, read_rows
from relax_hpc.data.tokenizer import Tokenizer


def read_prompts(
    path: Path, tokenizer: Tokenizer, rules: PromptRules
) -> tuple[list[Prompt], list[BadLine]]:
    """Prompts with tokens, and lines that are no valid prompt, read without an index."""
    with rules.rendering():
        entries = list(parse_rows(read_rows(path), tokenizer, rules))
    prompts = [entry for entry in entries if isinstance(entry, Prompt)]
    return prompts, [entry for entry in entries if isinstance(entry, BadLine)]


def load_prompts(
    path: Path, tokenizer: Tokenizer, rules: PromptRules, share: float
) -> tuple[list[Prompt], list[BadLine]]:
    """Prompts and bad lines by an index that is created here, and equal to those of `read_prompts`.

    ``share``: allowed share of bad lines. ConfigError: as `open_prompts`.
    """
    index = path.with_suffix(".index")
    index.unlink(missing_ok=True)
    with rules.rendering():
        first = open_prompts(path, index, tokenizer, rules, share)
        second = open_prompts(path, index, tokenizer, rules, share)
        result = list(first), first.bad
        assert (second[:], second.bad) == result == read_prompts(path, tokenizer, rules)
    return result


def row_set(path: Path | str) -> DataSet:
    """The data set of `data.train` with the rows at ``path``."""
    return DataSet("data.train", "train", str(path))
