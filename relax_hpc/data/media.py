"""Media of a row: their sources, and the placeholder tokens that represent them in the prompt.

A row names its media in columns (`data.multimodal_keys`), or in the parts of chat messages. The
position of each medium in the prompt is given by a mark such as `<image>` in a text, by a part of a
message, or by the model's placeholder token. When a file is indexed, a worker process only reads
the headers of media, to count their tokens. Media are decoded when their prompt is drawn.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json
from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.blocking import BlockingMediaPool
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions, with_options
from relax_hpc.data.multimodal.placeholders import Run, runs_with_sound, stamped_runs
from relax_hpc.data.multimodal.rules import KINDS_BY_FAMILY, Rules
from relax_hpc.data.multimodal.source import Source
from relax_hpc.data.named_media import (
    Columns,
    MediumReference,
    reference_to,
    source_of,
    split_at_marks,
)

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]
"""Tokenizes a text without tokens around it, such as BOS."""
ReadHeader = Callable[[Kind, Source, MediumOptions], Header]
"""Reads the header of a medium. UnusableMedium: it cannot be used."""


@dataclass(frozen=True, slots=True)
class PromptMedium:
    """A medium of a prompt."""

    kind: Kind
    source: Source = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    """(start, length) in the prompt of each run of placeholders."""
    blob: Path | None = None
    """File of its blob in a media store, named by its id; None: it is not stored yet."""
    options: MediumOptions = NO_OPTIONS

    @property
    def tokens(self) -> int:
        """Number of placeholders."""
        return sum(length for _, length in self.spans)

    def shifted(self, tokens: int) -> PromptMedium:
        """The medium after that many ``tokens`` were inserted before the sequence."""
        return replace(self, spans=tuple((start + tokens, length) for start, length in self.spans))


def spans_of(media: Sequence[PromptMedium]) -> list[dict[str, Any]]:
    """Field `spans` of the rows of a prompt with these stored ``media``, sorted by position: the
    spans of a video and of its sound alternate."""
    spans: list[dict[str, Any]] = []
    for medium in media:
        if medium.blob:
            kind, media_id = str(medium.kind), medium.blob.name
            spans += [
                {"kind": kind, "start": start, "length": length, "media_id": media_id}
                for start, length in medium.spans
            ]
    return sorted(spans, key=itemgetter("start"))


def tokens_by_id(media: Sequence[PromptMedium]) -> dict[str, int]:
    """Field `media_tokens` of these rows: number of placeholders of each medium, by its id."""
    counts = Counter[str]()
    for medium in media:
        if medium.blob:
            counts[medium.blob.name] += medium.tokens
    return dict(counts)


@dataclass(frozen=True, slots=True, repr=False)
class PlaceholderTokens:
    """Tokens that mark the position of a medium in a prompt."""

    placeholder: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.before, self.placeholder, *self.after)

    def __repr__(self) -> str:
        # Part of the key of an index of prompts (`MediaRules.key`). Another text would invalidate
        # the indexes of runs that release 0.1 has begun.
        return f"Place(placeholder={self.placeholder}, before={self.before}, after={self.after})"


Place = PlaceholderTokens  # Name in release 0.1.


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Rules for the media of rows."""

    rules: Rules
    columns: tuple[tuple[Kind, str], ...]
    """Kind of medium, and a column that names the media of this kind."""
    placeholders: tuple[tuple[Kind, PlaceholderTokens], ...]
    """Kind of medium, and its tokens in a prompt."""
    folder: Path
    """Folder that paths of media are relative to."""
    with_sound: bool
    """Whether the model also hears the sound of a video."""
    max_bytes: int
    """Maximum size of a file."""
    pool: BlockingMediaPool = field(compare=False, repr=False)
    """Worker process that reads the files."""

    @classmethod
    def from_config(cls, data: DataConfig, model: Path, folder: Path) -> MediaRules | None:
        """Rules of a run for the files of ``folder``; None: the ``model``, a Hugging Face
        directory, is a text model. ConfigError: the model does not support a setting of
        `data.multimodal`."""
        placeholders = read_placeholder_tokens(model)
        if not placeholders:
            return None
        columns = tuple((kind, column) for kind, column in columns_of(data) if kind in placeholders)
        rules = Rules.from_model(model, data.multimodal)
        limits = Limits.from_config(data.multimodal)
        with_sound = data.multimodal.use_audio_in_video
        if with_sound and not (rules.rate and Kind.AUDIO in placeholders):
            raise ConfigError(
                "data.multimodal.use_audio_in_video: found true, allowed: false; the model in "
                f"{model} does not hear"
            )
        pool = BlockingMediaPool(rules, limits)
        return cls(
            rules, columns, tuple(placeholders.items()), folder, with_sound, limits.bytes, pool
        )

    @property
    def key(self) -> list[Any]:
        """Value that is equal for rules that make the same prompts from the same rows."""
        return [repr(self.rules), self.columns, repr(self.placeholders), self.with_sound]

    def take_columns(self, record: dict[str, Any]) -> Columns:
        """Media that the columns of ``record`` name. The columns are removed from it.
        UnusableMedium: two columns name media of one kind."""
        media: Columns = {}
        for kind, column in self.columns:
            value = record.pop(column, None)
            # A null means no medium, as in rows of a table, where null fields are dropped.
            if value is None:
                continue
            if media.get(kind):
                raise UnusableMedium(Reason.SPANS, f"found {kind}s in two columns, allowed: one")
            media[kind] = deque(value if isinstance(value, list) else [value])
        return media

    def expand_placeholders(
        self,
        ids: Sequence[int],
        sources: Mapping[Kind, Sequence[Any]],
        encode: Encode,
        read_header: ReadHeader | None = None,
    ) -> tuple[list[int], list[PromptMedium]]:
        """``ids`` with one placeholder for each token of each medium, and the media in their order.

        ``sources``: one for each placeholder in ``ids``. ``encode``: tokenizes the time stamps
        within a video. ``read_header``: None: the pool reads headers. UnusableMedium: the number of
        ``sources`` of a kind is not that of its placeholders in ``ids``, or a medium cannot be
        used.
        """
        read_header = read_header or self.pool.header
        kinds = {tokens.placeholder: kind for kind, tokens in self.placeholders}
        for kind in sources.keys() - kinds.values():
            raise unsupported_kind(kind)
        counts = Counter(kinds[token] for token in ids if token in kinds)
        for kind in sources.keys() | counts.keys():
            named = len(sources.get(kind, ()))
            if named != counts[kind]:
                raise UnusableMedium(
                    Reason.SPANS, f"places for {counts[kind]} {kind}s in the prompt, {named} named"
                )
        pending = {kind: deque(values) for kind, values in sources.items()}
        expanded, media = list[int](), list[PromptMedium]()
        for token in ids:
            if token in kinds:
                kind = kinds[token]
                reference = reference_to(kind, pending[kind].popleft())
                media += self._append_medium(expanded, kind, reference, encode, read_header)
            else:
                expanded.append(token)
        return expanded, media

    def _append_medium(
        self,
        expanded: list[int],
        kind: Kind,
        reference: MediumReference,
        encode: Encode,
        read_header: ReadHeader,
    ) -> list[PromptMedium]:
        """Append the tokens of a medium to ``expanded``. Return the medium, and for a video that is
        heard also its sound."""
        source = source_of(reference.value, self.folder, self.max_bytes)
        headers = self._headers(kind, source, reference.options, read_header)
        rules = with_options(self.rules, reference.options)
        placeholders = dict(self.placeholders)
        spans: dict[Kind, list[tuple[int, int]]] = {}
        for before, (run_kind, count), after in self._runs(headers, rules, encode):
            expanded += before
            spans.setdefault(run_kind, []).append((len(expanded), count))
            expanded += [placeholders[run_kind].placeholder] * count + [*after]
        media: list[PromptMedium] = []
        for run_kind, runs in spans.items():
            # The options of a video do not cut its sound.
            options = reference.options if run_kind is kind else NO_OPTIONS
            media.append(PromptMedium(run_kind, source, tuple(runs), options=options))
        return media

    def _headers(
        self, kind: Kind, source: Source, options: MediumOptions, read_header: ReadHeader
    ) -> list[Header]:
        """Header of a medium, and for a video that is heard also that of its sound, if any."""
        headers = [read_header(kind, source, options)]
        if kind is Kind.VIDEO and self.with_sound:
            if options.video_start is not None or options.video_end is not None:
                raise UnusableMedium(
                    Reason.OPTION,
                    "video_start, video_end: not with data.multimodal.use_audio_in_video",
                )
            try:
                headers.append(read_header(Kind.AUDIO, source, NO_OPTIONS))
            except UnusableMedium as bad:
                if bad.reason is not Reason.NO_STREAM:
                    raise
        return headers

    def _runs(
        self, headers: Sequence[Header], rules: Rules, encode: Encode
    ) -> Iterator[tuple[Sequence[int], Run, Sequence[int]]]:
        """Runs of placeholders of a medium, or of a video and its sound, each with the tokens
        before and after it."""
        header, *sounds = headers
        placeholders = dict(self.placeholders)
        if sounds:
            audio, runs = placeholders[Kind.AUDIO], runs_with_sound(header, sounds[0], rules)
            for number, run in enumerate(runs):
                before = audio.before if number == 0 else ()
                after = audio.after if number == len(runs) - 1 else ()
                yield before, run, after
        elif header.seconds and rules.stamped:
            tokens = placeholders[header.kind]
            for stamp, run in stamped_runs(header, rules):
                yield [*encode(stamp), *tokens.before], run, tokens.after
        else:
            yield (), (header.kind, rules.tokens(header)), ()

    def encode_with_marks(
        self, text: str, kinds: Columns, tokenizer: Tokenizer, as_tokens: bool
    ) -> list[int]:
        """Token ids of a text in which marks such as `<image>` stand for media of these ``kinds``;
        marks of other kinds are text."""
        placeholders, ids = dict(self.placeholders), list[int]()
        marked = {kind: values for kind, values in kinds.items() if kind in placeholders}
        for number, piece in enumerate(split_at_marks(text, marked)):
            if isinstance(piece, Kind):
                ids += placeholders[piece].tokens
            elif piece or not number:
                ids += tokenizer.encode(piece, special=not number, special_tokens=as_tokens)
        return ids


def columns_of(data: DataConfig) -> Iterator[tuple[Kind, str]]:
    """Kinds of media, and the columns that name the media of a row: the one in
    `data.multimodal_keys`, or by default the kind in the plural and in the singular. An empty name
    in `data.multimodal_keys` means no column."""
    for kind in Kind:
        named = data.multimodal_keys.get(str(kind))
        for column in (f"{kind}s", str(kind)) if named is None else (named,):
            if column:
                yield kind, column


def unsupported_kind(kind: Kind) -> UnusableMedium:
    """Error for a row with a medium of a ``kind`` that the model does not support."""
    families = ", ".join(name for name, kinds in KINDS_BY_FAMILY.items() if kind in kinds)
    return UnusableMedium(
        Reason.KIND,
        f"found {kind}s, which this model does not take; allowed with model_type {families}",
    )


def read_placeholder_tokens(model: Path) -> dict[Kind, PlaceholderTokens]:
    """Tokens of each kind of medium in prompts of a ``model``, a Hugging Face directory; empty: it
    is a text model, or has no config.json."""
    try:
        return placeholders_in_config(read_json(model / "config.json"))
    except (OSError, ValueError):
        return {}


places_of = read_placeholder_tokens  # Name in release 0.1.


def placeholders_in_config(config: Any) -> dict[Kind, PlaceholderTokens]:
    """Tokens of each kind of medium by the ids in ``config``, the content of a config.json."""
    # In Qwen3-Omni the ids of prompts are those of the thinker, one level below.
    values = config.get("thinker_config", config) if isinstance(config, dict) else {}
    if not isinstance(values, dict):
        return {}

    def ids(name: str) -> tuple[int, ...]:
        value = values.get(f"{name}_token_id", values.get(f"{name}_token_index"))
        return (value,) if type(value) is int else ()

    placeholders: dict[Kind, PlaceholderTokens] = {}
    for kind in Kind:
        sense = "audio" if kind is Kind.AUDIO else "vision"
        for placeholder in ids(kind):
            before, after = ids(f"{sense}_start"), ids(f"{sense}_end")
            placeholders[kind] = PlaceholderTokens(placeholder, before, after)
    return placeholders
