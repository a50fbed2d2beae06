"""Demonstrations of a warm start: sequences of a file, their trained tokens, and their media."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.data.examples import demonstration_of
from relax_hpc.data.media import PromptMedium, spans_of
from relax_hpc.data.multimodal.bad_media import UnusableMedium
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.options import MediumOptions
from relax_hpc.data.multimodal.pool import Loaded
from relax_hpc.data.multimodal.source import Source
from relax_hpc.data.prompts import PromptRules
from relax_hpc.data.rows import BadRecord
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.queue.row_schema import Row


def read_demonstrations(
    path: Path, rules: PromptRules, tokenizer: Tokenizer
) -> tuple[list[Row], dict[str, Medium]]:
    """Rows of a jsonl file of demonstrations, and their media by id.

    For the format of lines see `relax_hpc.data.examples`; media are given as in `data.prompts`.
    ConfigError names the line that is not a demonstration.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(
            f"{path}: {error.strerror}; the warm start needs demonstrations"
        ) from error
    # Media are decoded here, before the training, and stay in memory.
    reader, rows = _DemonstrationReader(rules, tokenizer, {}), list[Row]()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(reader.read(json.loads(line)))
        except (ValueError, BadRecord, UnusableMedium) as error:
            reason = ": ".join(map(str, error.args))
            raise ConfigError(
                f"{path}:{number}: {reason}; expected a demonstration, as in files of sft"
            ) from error
    if not rows:
        raise ConfigError(f"{path}: empty; expected one demonstration per line")
    return rows, reader.media


@dataclass(frozen=True, slots=True)
class _DemonstrationReader:
    rules: PromptRules
    tokenizer: Tokenizer
    media: dict[str, Medium]

    def read(self, line: Any) -> Row:
        """Row of a line. BadRecord, UnusableMedium: the line cannot be used."""
        if not isinstance(line, dict):
            raise BadRecord("wrong_type", f"a line is a {type(line).__name__}, allowed: an object")
        media_rules = self.rules.media
        decoded: dict[tuple[Kind, Source, MediumOptions], Loaded] = {}

        def read_header(kind: Kind, source: Source, options: MediumOptions) -> Header:
            # The whole medium is needed below, so it is decoded only once.
            assert media_rules
            loaded = media_rules.pool.load(kind, source, options)
            decoded[kind, source, options] = loaded
            return loaded.header

        demonstration = demonstration_of(line, self.tokenizer, self.rules, read_header)
        media = [
            self._store(medium, decoded[medium.kind, medium.source, medium.options])
            for medium in demonstration.media
        ]
        return {
            "token_ids": list(demonstration.token_ids),
            "loss_mask": list(demonstration.loss_mask),
            "spans": spans_of(media),
        }

    def _store(self, medium: PromptMedium, loaded: Loaded) -> PromptMedium:
        # A copy, because Linux limits the number of memory mappings of a process.
        self.media[loaded.media_id] = Medium.from_bytes(bytes(loaded.blob))
        return replace(medium, blob=Path(loaded.media_id))
