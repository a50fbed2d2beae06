"""Check of media that rows name: a sample is decoded. `relax-hpc check` reads headers only."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config
from relax_hpc.data.examples import rules_of
from relax_hpc.data.media import MediaRules
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.prompts import Prompt, PromptRules
from relax_hpc.data.row_files import RowFiles, RowLocations, data_sets
from relax_hpc.data.rows import BadLine
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.ops.checks.model_files import find_model
from relax_hpc.ops.doctor.finding import Finding, error, ok, warning
from relax_hpc.tasks import tool_signatures

MAX_ROWS = 500
"""Rows of a data set whose media are decoded, evenly spread over the set."""
MAX_TRY_S = 30.0
"""Seconds for a data set; the doctor skips the remaining rows after that."""
_MAX_NAMED = 5
"""Bad rows that the finding names."""


@dataclass(slots=True)
class _Trial:
    """Number of rows and media that were decoded, and descriptions of bad rows."""

    rows: int = 0
    media: int = 0
    bad: list[str] = field(default_factory=list)


def check_media(config: Config) -> Iterator[Finding]:
    """Decode media of each data set; no findings if the model accepts only text."""
    tokenizer = find_model(config.model).tokenizer if config.model.path else None
    if not tokenizer:
        return
    for rows in data_sets(config.data):
        # `check_files` reports a set that cannot be read.
        with suppress(ConfigError):
            files = rows.files()
            rules = rules_of(config, tokenizer, files.folder, tool_signatures(config), rows.name)
            if rules.media:
                trial = _try_rows(files, tokenizer, rules, rules.media)
                yield _finding(rows.setting, trial, config.data.max_bad_share)


def _finding(key: str, trial: _Trial, allowed: float) -> Finding:
    if not trial.bad:
        return ok(f"{key}: {trial.media} media of {trial.rows} rows were decoded")
    bad = (
        f"{key}: media of {len(trial.bad)} of {trial.rows} rows cannot be used: "
        f"{'; '.join(trial.bad[:_MAX_NAMED])}"
    )
    if len(trial.bad) <= allowed * trial.rows:
        return warning(f"{bad}; the run skips and counts these rows")
    return error(f"{bad}; allowed share {allowed}; correct the files, or raise data.max_bad_share")


def _try_rows(
    files: RowFiles, tokenizer: Tokenizer, rules: PromptRules, media: MediaRules
) -> _Trial:
    """Decode the media of up to MAX_ROWS rows, within MAX_TRY_S seconds."""
    trial, positions = _Trial(), RowLocations()
    deadline = time.monotonic() + MAX_TRY_S
    stride = -(-files.count() // MAX_ROWS)
    with rules.rendering():
        for row in files.rows(positions, with_media=True):
            if isinstance(row, BadLine) or row[0] % stride:
                continue
            if time.monotonic() > deadline:
                break
            trial.rows += 1
            reason = _media_fault(rules.parse_row(*row, tokenizer), media, trial)
            if reason:
                trial.bad.append(f"{positions.describe(row[0])}: {reason}")
    return trial


def _media_fault(prompt: Prompt | BadLine, media: MediaRules, trial: _Trial) -> str:
    """Reason why a row's media cannot be used; empty if all of them can be decoded."""
    if isinstance(prompt, BadLine):
        return f"{prompt.reason}: {prompt.detail}"
    try:
        for medium in prompt.media:
            trial.media += 1
            media.pool.load(medium.kind, medium.source)
    except UnusableMedium as bad:
        return str(bad)
    return ""
