"""Demonstrations of a warm start: the sequences of a file, which of their tokens are learned, and
their media."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.data.examples import demonstration_of
from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.data.multimodal.bad_media import BadMedium
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.options import MediumOptions
from relax_hpc.data.multimodal.pool import Loaded
from relax_hpc.data.multimodal.source import Source
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.rows import BadRecord
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.queue.row_schema import Row


def read_demonstrations(
    path: Path, how: PromptRules, tokenizer: Tokenizer
) -> tuple[list[Row], dict[str, Medium]]:
    """Rows of a jsonl file of demonstrations, see `relax_hpc.data.examples`, and their media by id,
    which lines have as those of `data.prompts` do.

    ConfigError names the line that is not one.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the warm start needs demonstrations"
        ) from error
    reading, rows = _Reading(how, tokenizer, {}), list[Row]()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(reading.row(json.loads(line)))
        except (ValueError, BadRecord, BadMedium) as error:
            why = ": ".join(map(str, error.args))
            raise ConfigError(
                f"{path}:{number}: {why}; expected a demonstration, as files of sft have them"
            ) from error
    if not rows:
        raise ConfigError(f"{path}: empty; expected a demonstration a line")
    return rows, reading.media


@dataclass(frozen=True, slots=True)
class _Reading:
    how: PromptRules
    tokenizer: Tokenizer
    media: dict[str, Medium]

    def row(self, line: Any) -> Row:
        """Row of a line. BadRecord, BadMedium: it cannot be used."""
        if not isinstance(line, dict):
            raise BadRecord("wrong_type", f"a line is a {type(line).__name__}, allowed: an object")
        rules = self.how.media
        decoded: dict[tuple[Kind, Source, MediumOptions], Loaded] = {}

        def read_header(kind: Kind, source: Source, options: MediumOptions) -> Header:
            # The whole medium is needed next, so it is decoded once.
            assert rules
            loaded = decoded[kind, source, options] = rules.pool.load(kind, source, options)
            return loaded.header

        learned = demonstration_of(line, self.tokenizer, self.how, read_header)
        media = [
            self._stored(medium, decoded[medium.kind, medium.source, medium.options])
            for medium in learned.media
        ]
        return {
            "token_ids": list(learned.token_ids),
            "loss_mask": list(learned.loss_mask),
            "spans": spans_of(media),
        }

    def _stored(self, medium: PromptMedium, loaded: Loaded) -> PromptMedium:
        # A copy: a process may have so many maps of memory, and no more.
        self.media[loaded.media_id] = Medium.from_bytes(bytes(loaded.blob))
        return replace(medium, blob=Path(loaded.media_id))
