"""Findings on media that rows name. Some are decoded here; a check of settings reads headers
alone."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config
from relax_hpc.data.examples import rules_of
from relax_hpc.data.multimodal.bad_media import BadMedium
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.row_files import Places, RowFiles, data_sets
from relax_hpc.data.rows import BadLine
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.ops.checks.model_files import find_model
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.tasks import tools_of

MOST_ROWS = 500
"""Rows of a file that are tried, evenly spread over it."""
TRY_S = 30.0
"""Seconds for a file of rows, after which the rest is left to the run."""
_NAMED = 5
"""Bad rows that are named."""


@dataclass(slots=True)
class _Tried:
    """Rows that were tried, and those of them whose media are of no use."""

    rows: int = 0
    media: int = 0
    bad: list[str] = field(default_factory=list)


def check_media(config: Config) -> Iterator[Finding]:
    """Findings on the media of each file of prompts; none where the model takes text alone."""
    tokenizer = find_model(config.model).tokenizer if config.model.path else None
    for rows in data_sets(config.data):
        # A set that cannot be read is a mistake, which `check_files` reports.
        with suppress(ConfigError):
            files = rows.files()
            how = rules_of(config, tokenizer, files.folder, tools_of(config), rows.name)
            if tokenizer and how.media:
                yield _finding(
                    rows.setting, _tried(files, tokenizer, how), config.data.max_bad_share
                )


def _finding(key: str, tried: _Tried, allowed: float) -> Finding:
    if not tried.bad:
        return ok(f"{key}: media of {tried.rows} rows were decoded, {tried.media} in all")
    bad = (
        f"{key}: media of {len(tried.bad)} of {tried.rows} rows are of no use: "
        f"{'; '.join(tried.bad[:_NAMED])}"
    )
    if len(tried.bad) <= allowed * tried.rows:
        return warning(f"{bad}; their rows will be left out, and counted")
    return error(f"{bad}; allowed share {allowed}; mend the files, or raise data.max_bad_share")


def _tried(files: RowFiles, tokenizer: Tokenizer, how: PromptRules) -> _Tried:
    found, places, until = _Tried(), Places(), time.monotonic() + TRY_S
    every = -(-files.count() // MOST_ROWS)
    with how.rendering():
        for row in files.rows(places, with_media=True):
            if isinstance(row, BadLine) or row[0] % every:
                continue
            if time.monotonic() > until:
                break
            found.rows += 1
            if why := _fault(how.read(*row, tokenizer), how, found):
                found.bad.append(f"{places.of(row[0])}: {why}")
    return found


def _fault(one: Prompt | BadLine, how: PromptRules, found: _Tried) -> str:
    """Reason why a row's media are of no use; empty: they are, or it has none."""
    if isinstance(one, BadLine):
        return f"{one.reason}: {one.detail}"
    try:
        for medium in one.media:
            found.media += 1
            how.media.pool.load(medium.kind, medium.source)
    except BadMedium as bad:
        return str(bad)
    return ""
