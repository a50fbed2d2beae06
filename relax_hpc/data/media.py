"""Media of a row: where they come from, and which of its prompt's tokens stand for them.

A row names its media in columns (`data.multimodal_keys`), or in the parts of chat messages. A
prompt has one place for each: a mark such as `<image>` in a text, a part of a message, or the
model's own placeholder token. Sources are looked at as far as it takes to count tokens, by a
worker; what they hold is decoded when the prompt is drawn.
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
from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.blocking import BlockingMediaPool
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions, with_options
from relax_hpc.data.multimodal.placeholders import Run, runs_with_sound, stamped_runs
from relax_hpc.data.multimodal.rules import TAKEN, Rules
from relax_hpc.data.multimodal.source import Source
from relax_hpc.data.named_media import Columns, reference_to, source_of, split_at_marks

if TYPE_CHECKING:
    from relax_hpc.config.schema import DataConfig
    from relax_hpc.data.tokenizer import Tokenizer

Encode = Callable[[str], list[int]]
"""Maker of the tokens of a text, without any around it."""
ReadHeader = Callable[[Kind, Source, MediumOptions], Header]
"""Reader of the header of a medium. BadMedium: it cannot be used."""


@dataclass(frozen=True, slots=True)
class PromptMedium:
    """A medium of a prompt."""

    kind: Kind
    source: Source = field(repr=False)
    spans: tuple[tuple[int, int], ...]
    """Places in the prompt: (start, length) of each run of placeholders."""
    blob: Path | None = None
    """File of its blob in a media store, by the name of its id; None: it was not stored yet."""
    options: MediumOptions = NO_OPTIONS

    @property
    def tokens(self) -> int:
        """Placeholders that stand for it."""
        return sum(length for _, length in self.spans)

    def behind(self, tokens: int) -> PromptMedium:
        """The same where so many ``tokens`` stand before all that it is in."""
        return replace(self, spans=tuple((start + tokens, length) for start, length in self.spans))


def spans_of(media: Sequence[PromptMedium]) -> list[dict[str, Any]]:
    """Field `spans` of the rows of a prompt with these ``media``, which are stored, in the order of
    their places: a video and its own sound take turns."""
    found = [
        {"kind": str(medium.kind), "start": start, "length": length, "media_id": medium.blob.name}
        for medium in media
        if medium.blob
        for start, length in medium.spans
    ]
    return sorted(found, key=itemgetter("start"))


def tokens_by_id(media: Sequence[PromptMedium]) -> dict[str, int]:
    """Field `media_tokens` of such rows: placeholders of each medium, by its id."""
    found = Counter[str]()
    for medium in media:
        if medium.blob:
            found[medium.blob.name] += medium.tokens
    return dict(found)


@dataclass(frozen=True, slots=True)
class Place:
    """Tokens by which a prompt has a place for a medium."""

    placeholder: int
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.before, self.placeholder, *self.after)


@dataclass(frozen=True, slots=True)
class MediaRules:
    """Rules by which rows have media."""

    rules: Rules
    columns: tuple[tuple[Kind, str], ...]
    """Kind of medium, and the column that names those of a row."""
    places: tuple[tuple[Kind, Place], ...]
    """Kind of medium, and a place for one in a prompt."""
    folder: Path
    """Folder that paths of media are relative to."""
    with_sound: bool
    """Whether the sound of a video is heard too."""
    most_bytes: int
    """Bytes of a file at most."""
    pool: BlockingMediaPool = field(compare=False, repr=False)
    """Worker that looks into the files."""

    @classmethod
    def of(cls, data: DataConfig, model: Path, folder: Path) -> MediaRules | None:
        """Rules of a run for the files of ``folder``; None: the ``model``, a Hugging Face
        directory, takes text alone. ConfigError: it cannot take them as `data.multimodal` says."""
        places = places_of(model)
        if not places:
            return None
        columns = tuple((kind, column) for kind, column in columns_of(data) if kind in places)
        rules, limits = Rules.of(model, data.multimodal), Limits.of(data.multimodal)
        with_sound = data.multimodal.use_audio_in_video
        if with_sound and not (rules.rate and Kind.AUDIO in places):
            raise ConfigError(
                "data.multimodal.use_audio_in_video: found true, allowed: false; the model in "
                f"{model} does not hear"
            )
        pool = BlockingMediaPool(rules, limits)
        return cls(rules, columns, tuple(places.items()), folder, with_sound, limits.bytes, pool)

    @property
    def key(self) -> list[Any]:
        """Value that is the same for rules by which rows become the same prompts."""
        return [repr(self.rules), self.columns, repr(self.places), self.with_sound]

    def taken(self, record: dict[str, Any]) -> Columns:
        """Media that the columns of ``record`` name, which are taken out of it. BadMedium: two
        columns name media of one kind."""
        media: Columns = {}
        for kind, column in self.columns:
            value = record.pop(column, None)
            # A null is no medium, as in rows of a table, where fields that are null are left out.
            if value is None:
                continue
            if media.get(kind):
                raise BadMedium(Reason.SPANS, f"found {kind}s in two columns, allowed: one")
            media[kind] = deque(value if isinstance(value, list) else [value])
        return media

    def placed(
        self,
        ids: Sequence[int],
        sources: Mapping[Kind, Sequence[Any]],
        encode: Encode,
        header: ReadHeader | None = None,
    ) -> tuple[list[int], list[PromptMedium]]:
        """``ids`` with as many placeholders for each medium as it has tokens, and the media in
        their order.

        ``encode``: makes tokens of the time stamps between those of a video. ``header``: None: the
        pool's. BadMedium: there are not as many ``sources`` of a kind as ``ids`` have places, or
        one is of no use.
        """
        places, look = dict(self.places), header or self.pool.header
        kinds = {place.placeholder: kind for kind, place in self.places}
        for kind in sources.keys() - kinds.values():
            raise not_taken(kind)
        wanted = Counter(kinds[token] for token in ids if token in kinds)
        for kind in sources.keys() | wanted.keys():
            if (named := len(sources.get(kind, ()))) != wanted[kind]:
                raise BadMedium(
                    Reason.SPANS, f"places for {wanted[kind]} {kind}s in the prompt, {named} named"
                )
        waiting = {kind: deque(some) for kind, some in sources.items()}
        expanded, media = list[int](), list[PromptMedium]()
        for token in ids:
            if token not in kinds:
                expanded.append(token)
                continue
            kind = kinds[token]
            reference = reference_to(kind, waiting[kind].popleft())
            source = source_of(reference.value, self.folder, self.most_bytes)
            options = reference.options
            headers = self._headers(kind, source, options, look)
            rules = with_options(self.rules, options)
            spans: dict[Kind, list[tuple[int, int]]] = {}
            for before, (seen, count), after in self._runs(headers, rules, encode):
                expanded += before
                spans.setdefault(seen, []).append((len(expanded), count))
                expanded += [places[seen].placeholder] * count + [*after]
            for seen, runs in spans.items():
                # The sound of a video is whole, whatever its frames are.
                own = options if seen is kind else NO_OPTIONS
                media.append(PromptMedium(seen, source, tuple(runs), options=own))
        return expanded, media

    def _headers(
        self, kind: Kind, source: Source, options: MediumOptions, header: ReadHeader
    ) -> list[Header]:
        """Header of a medium, and of the sound of a video that is heard too, if it has any."""
        found = [header(kind, source, options)]
        if kind is Kind.VIDEO and self.with_sound:
            if options.video_start is not None or options.video_end is not None:
                raise BadMedium(
                    Reason.OPTION,
                    "video_start, video_end: not with data.multimodal.use_audio_in_video",
                )
            try:
                found.append(header(Kind.AUDIO, source, NO_OPTIONS))
            except BadMedium as bad:
                if bad.reason is not Reason.NO_STREAM:
                    raise
        return found

    def _runs(
        self, headers: Sequence[Header], rules: Rules, encode: Encode
    ) -> Iterator[tuple[Sequence[int], Run, Sequence[int]]]:
        """Runs of placeholders of a medium, or a video and its sound, each with the tokens before
        and after it."""
        about, places = headers[0], dict(self.places)
        if len(headers) > 1:
            sound, runs = places[Kind.AUDIO], runs_with_sound(*headers, rules)
            for number, run in enumerate(runs):
                yield (
                    sound.before if not number else (),
                    run,
                    sound.after if number == len(runs) - 1 else (),
                )
        elif about.seconds and rules.stamped:
            place = places[about.kind]
            for stamp, run in stamped_runs(about, rules):
                yield [*encode(stamp), *place.before], run, place.after
        else:
            yield (), (about.kind, rules.tokens(about)), ()

    def encoded(
        self, text: str, kinds: Columns, tokenizer: Tokenizer, as_tokens: bool
    ) -> list[int]:
        """Token ids of a text whose marks are places for media of these ``kinds``; other marks are
        text."""
        places, ids = dict(self.places), list[int]()
        known = {kind: some for kind, some in kinds.items() if kind in places}
        for number, piece in enumerate(split_at_marks(text, known)):
            if isinstance(piece, Kind):
                ids += places[piece].tokens
            elif piece or not number:
                ids += tokenizer.encode(piece, special=not number, special_tokens=as_tokens)
        return ids


def columns_of(data: DataConfig) -> Iterator[tuple[Kind, str]]:
    """Kinds of media, and the columns that name those of a row: the one of `data.multimodal_keys`,
    else the kind in the plural or the singular. An empty name there: none."""
    for kind in Kind:
        named = data.multimodal_keys.get(str(kind))
        for column in (f"{kind}s", str(kind)) if named is None else (named,):
            if column:
                yield kind, column


def not_taken(kind: Kind) -> BadMedium:
    """Error of a row with a medium of a ``kind`` that the model does not take."""
    takers = ", ".join(name for name, taken in TAKEN.items() if kind in taken)
    return BadMedium(
        Reason.KIND,
        f"found {kind}s, which this model does not take; allowed with model_type {takers}",
    )


def places_of(model: Path) -> dict[Kind, Place]:
    """Places that prompts of a ``model``, a Hugging Face directory, may have; empty: it takes text
    alone, or has no config.json."""
    try:
        return places_in(read_json(model / "config.json"))
    except (OSError, ValueError):
        return {}


def places_in(found: Any) -> dict[Kind, Place]:
    """Places by the token ids that a config.json with that content names."""
    # Models that think in text and talk in speech have those of the prompt one level below.
    names = found.get("thinker_config", found) if isinstance(found, dict) else {}

    def ids(name: str) -> tuple[int, ...]:
        value = (
            names.get(f"{name}_token_id", names.get(f"{name}_token_index"))
            if isinstance(names, dict)
            else None
        )
        return (value,) if type(value) is int else ()

    def place_of(kind: Kind) -> Place:
        sense = "audio" if kind is Kind.AUDIO else "vision"
        return Place(*ids(kind), ids(f"{sense}_start"), ids(f"{sense}_end"))

    return {kind: place_of(kind) for kind in Kind if ids(kind)}
