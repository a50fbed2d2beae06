"""Demonstrations of a warm start: the sequences of a file, which of their tokens are learned, and their media."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

from relax_hpc.data.examples import Learned, demonstration_of
from relax_hpc.data.media import MediaRules, PromptMedium, spans_of
from relax_hpc.data.named_media import Columns, with_parts
from relax_hpc.data.prompts import BadRecord, PromptRules
from relax_hpc.data.tokenizer import Tokenizer
from relax_hpc.errors import ConfigError
from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.medium import Header, Kind, Medium
from relax_hpc.multimodal.pool import Loaded
from relax_hpc.multimodal.source import Source
from relax_hpc.transfer_queue.row_schema import Row


def read_demonstrations(path: Path, how: PromptRules, tokenizer: Tokenizer) -> tuple[list[Row], dict[str, Medium]]:
    """Rows of a jsonl file of demonstrations, see `relax_hpc.data.examples`, and their media by id, which lines have as
    those of `data.prompts` do.

    ConfigError names the line that is not one.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; the warm start needs demonstrations") from error
    reading, rows = _Reading(how, tokenizer, {}), list[Row]()
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(reading.row(json.loads(line)))
        except (ValueError, BadRecord, BadMedium) as error:
            why = ": ".join(map(str, error.args))
            raise ConfigError(f"{path}:{number}: {why}; expected a demonstration, as files of sft have them") from error
    if not rows:
        raise ConfigError(f"{path}: empty; expected a demonstration a line")
    return rows, reading.media


@dataclass(frozen=True, slots=True)
class _Reading:
    how: PromptRules
    tokenizer: Tokenizer
    media: dict[str, Medium]

    def row(self, line: Any) -> Row:
        """Row of a line. BadRecord, BadMedium: it is none."""
        if not isinstance(line, dict):
            raise BadRecord("wrong_type", f"a line is a {type(line).__name__}, allowed: an object")
        rules, columns = self.how.media, {}
        if rules:
            columns = rules.taken(line)
            if "messages" in line:
                line["messages"], columns = with_parts(line["messages"], columns)
        learned = demonstration_of(line, self.tokenizer, self.how)
        if not rules:
            return {"token_ids": list(learned.token_ids), "loss_mask": list(learned.loss_mask), "spans": []}
        return self._with_media(learned, columns, rules)

    def _with_media(self, learned: Learned, columns: Columns, rules: MediaRules) -> Row:
        """The same with as many placeholders for each medium as it has tokens: piece by piece, as none is learned."""
        tokens, mask, media = list[int](), list[int](), list[PromptMedium]()
        encode, waiting = functools.partial(self.tokenizer.encode, special=False), _in_turn(columns)
        decoded: dict[tuple[Kind, Source], Loaded] = {}

        def header(kind: Kind, source: Source) -> Header:
            # All of it is wanted next.
            loaded = decoded[kind, source] = rules.pool.load(kind, source)
            return loaded.header

        for is_learned, piece in groupby(zip(learned.loss_mask, learned.token_ids, strict=True), itemgetter(0)):
            ids = [token for _, token in piece]
            sources = {kind: list(islice(waiting[kind], ids.count(place.placeholder))) for kind, place in rules.places}
            ids, placed = rules.placed(ids, sources, encode, header)
            media += [self._stored(one.behind(len(tokens)), decoded[one.kind, one.source]) for one in placed]
            tokens += ids
            mask += [is_learned] * len(ids)
        if left := sum(len(list(some)) for some in waiting.values()):
            raise BadMedium(Reason.SPANS, f"{left} media named that there is no place for")
        return {"token_ids": tokens, "loss_mask": mask, "spans": spans_of(media)}

    def _stored(self, medium: PromptMedium, loaded: Loaded) -> PromptMedium:
        # A copy: a process may have so many maps of memory, and no more.
        self.media[loaded.media_id] = Medium.from_bytes(bytes(loaded.blob))
        return replace(medium, blob=Path(loaded.media_id))


def _in_turn(columns: Columns) -> dict[Kind, Iterator[Any]]:
    """Media that are named, of each kind, to be taken one after the other."""
    return {kind: iter(columns.get(kind, ())) for kind in Kind}
