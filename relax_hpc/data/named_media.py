"""Media that a row names by marks in texts, by parts of chat messages, or in columns."""

from __future__ import annotations

import base64
import binascii
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions
from relax_hpc.data.multimodal.source import Source

Columns = dict[Kind, deque[Any]]
"""Media that a row names, by kind, in the order of their positions: values for `reference_to`."""
_MARK = re.compile("(<image>|<video>|<audio>)")
_CONTENT = ("bytes", "path", "url", "base64", "data")
"""Keys of an object that hold a content, or a path or URI of it."""
_IGNORED = frozenset(["type", "cache_control", "media_type", "format", "detail"])
"""Further keys of such an object, which have no effect here. The format is known by the first bytes
of the content. `detail` is checked."""
_DETAILS = (None, "auto", "high")
"""Values of OpenAI's `detail` that mean the image in its full size."""


@dataclass(frozen=True, slots=True)
class MediumReference:
    """A medium that a row names."""

    value: Any
    """A path, URI or bytes, see `source_of`."""
    options: MediumOptions = NO_OPTIONS


def split_at_marks(text: str, kinds: Columns) -> Iterator[str | Kind]:
    """Pieces of ``text``, and between them the kinds of the media whose marks stand there.

    >>> list(split_at_marks("a<image>b<audio>", {Kind.IMAGE: deque()}))
    ['a', <Kind.IMAGE: 'image'>, 'b<audio>']
    """
    marks = {f"<{kind}>": kind for kind in kinds}
    text_before = ""
    for piece in _MARK.split(text):
        if piece in marks:
            yield text_before
            yield marks[piece]
            text_before = ""
        else:
            text_before += piece
    yield text_before


def with_parts(
    messages: Sequence[Mapping[str, Any]], columns: Columns
) -> tuple[list[dict[str, Any]], Columns]:
    """Messages for a template, with a part {"type"} for each medium; and all their media in order.

    If a part or a mark does not name its medium, it is the next one in ``columns``. UnusableMedium:
    a part has an unknown type, or an unknown key."""
    collector = _MediaCollector({kind: deque(values) for kind, values in columns.items()})
    template_messages = [
        {**message, "content": collector.strip(message.get("content"))} for message in messages
    ]
    for kind, values in collector.pending.items():
        collector.media[kind].extend(values)
    return template_messages, collector.media


class _MediaCollector:
    """Media of the messages of one row, collected in their order."""

    def __init__(self, columns: Columns) -> None:
        self.pending = columns
        """Media of the columns that no part or mark stands for yet."""
        self.media: Columns = defaultdict(deque)

    def strip(self, content: Any) -> Any:
        """``content`` of a message, a text or parts, whose media are parts {"type"}."""
        if isinstance(content, str):
            pieces = list(self._split_text(content))
            return pieces if any(piece["type"] != "text" for piece in pieces) else content
        if not isinstance(content, list):
            return content
        stripped: list[dict[str, Any]] = []
        for part in content:
            if part.get("type") == "text":
                stripped += self._split_text(part["text"])
            else:
                kind = kind_of_part(part)
                stripped.append(self._collect(kind, reference_in(kind, part)))
        return stripped

    def _split_text(self, text: str) -> Iterator[dict[str, Any]]:
        for piece in split_at_marks(text, self.pending):
            if isinstance(piece, Kind):
                yield self._collect(piece, None)
            elif piece:
                yield {"type": "text", "text": piece}

    def _collect(self, kind: Kind, reference: MediumReference | None) -> dict[str, Any]:
        """Add the medium of a part, or the next one of the columns, to `media`. Return the part for
        the template."""
        if self.pending.get(kind) and (reference is None or reference.value is None):
            value = self.pending[kind].popleft()
            options = reference.options if reference else NO_OPTIONS
            reference = reference_to(kind, value, options)
        if reference is not None and reference.value is not None:
            self.media[kind].append(reference)
        return {"type": str(kind)}


def kind_of_part(part: Mapping[str, Any]) -> Kind:
    """Kind of the medium in a part of a message, by the part's type, or by its keys if it has no
    type. UnusableMedium: the part is not a medium."""
    for kind in Kind:
        names = _part_names(kind)
        has_key = "type" not in part and any(name in part for name in names)
        if part.get("type") in names or has_key:
            return kind
    allowed = ", ".join(("text", *Kind))
    raise UnusableMedium(
        Reason.KIND, f"found a part of type {str(part.get('type'))[:40]!r}, allowed: {allowed}"
    )


def _part_names(kind: Kind) -> tuple[str, str, str]:
    """Types of parts, and keys of their contents, in Hugging Face's and OpenAI's formats."""
    return str(kind), f"{kind}_url", f"input_{kind}"


def reference_in(kind: Kind, part: Mapping[str, Any]) -> MediumReference:
    """Medium that a part names, with its options. Its value is None if a column of the row names
    it. UnusableMedium: the part has an unknown key."""
    fields = {key: value for key, value in part.items() if value is not None and key != "type"}
    nested = [fields.pop(key) for key in (*_part_names(kind), "source") if key in fields]
    plain = {key: fields.pop(key) for key in _CONTENT if key in fields}
    contents = [*nested, *([plain] if plain else [])]
    if len(contents) > 1:
        raise UnusableMedium(
            Reason.URI, f"found {len(contents)} contents in one part, allowed: one"
        )
    return reference_to(kind, contents[0] if contents else None, _options(kind, fields))


def reference_to(kind: Kind, value: Any, options: MediumOptions = NO_OPTIONS) -> MediumReference:
    """Medium that ``value`` names: a path, URI or bytes, or an object with one of these and with
    options, which replace ``options``. UnusableMedium: the object has an unknown key."""
    if isinstance(value, MediumReference):
        return value
    if not isinstance(value, Mapping):
        return MediumReference(value, options)
    fields = {key: entry for key, entry in value.items() if entry is not None}
    # `datasets` stores the bytes of a file together with its original path. The bytes come first
    # in _CONTENT.
    contents = [_uri(key, fields.pop(key)) for key in _CONTENT if key in fields]
    entry_options = _options(kind, fields)
    chosen = options if entry_options == NO_OPTIONS else entry_options
    return MediumReference(contents[0] if contents else None, chosen)


def _uri(key: str, content: Any) -> Any:
    """The ``content`` of ``key``; as a data URI if the key means base64."""
    if key in ("base64", "data") and isinstance(content, str) and not content.startswith("data:"):
        return f"data:;base64,{content}"
    return content


def _options(kind: Kind, fields: Mapping[str, Any]) -> MediumOptions:
    """Options of a part with these ``fields``. UnusableMedium: a field is neither an option nor in
    _IGNORED."""
    if fields.get("detail") not in _DETAILS:
        raise UnusableMedium(
            Reason.OPTION, f"detail: found {fields['detail']!r}, allowed: auto, high"
        )
    values = {key: value for key, value in fields.items() if key not in _IGNORED}
    return MediumOptions.from_mapping(kind, values)


def source_of(value: Any, folder: Path, max_bytes: int) -> Source:
    """Source of the medium that ``value`` names: a path relative to ``folder``, a file or data URI,
    or bytes. UnusableMedium: it names no such source, or holds more than ``max_bytes`` itself,
    which are then not copied."""
    if isinstance(value, bytes):
        _check_bytes(len(value), max_bytes)
        return value
    if isinstance(value, list):
        raise UnusableMedium(
            Reason.URI, "found a list, such as frames of a video; allowed: one file"
        )
    if not isinstance(value, str) or not value:
        raise UnusableMedium(
            Reason.URI,
            f"found {str(value)[:80]!r}, allowed: a path, file:// or data: URI, or bytes",
        )
    scheme = value[:8].partition(":")[0].lower()
    if scheme == "data":
        return _decoded(value, max_bytes)
    if scheme == "file":
        return folder / _path_of(value)
    if "://" in value[:12]:
        raise UnusableMedium(
            Reason.URI, f"found {value[:80]!r}; nothing is fetched from a network: name a file"
        )
    return folder / _without_nul(value)


def _path_of(uri: str) -> str:
    try:
        return _without_nul(unquote(urlsplit(uri).path))
    except ValueError as error:
        raise UnusableMedium(Reason.URI, f"found {uri[:80]!r}: {error}") from error


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise UnusableMedium(Reason.URI, f"found {path[:80]!r}, allowed: a path without NUL")
    return path


def _decoded(uri: str, max_bytes: int) -> bytes:
    begin = uri.find(",") + 1
    # Four characters of base64 are three bytes, of which the last two may be missing.
    _check_bytes((len(uri) - begin) // 4 * 3 - 2, max_bytes)
    try:
        if not uri[: max(0, begin - 1)].endswith(";base64"):
            raise ValueError("expected data:TYPE;base64,DATA")
        return base64.b64decode(uri[begin:], validate=True)
    except (ValueError, binascii.Error) as error:
        raise UnusableMedium(Reason.URI, f"data URI {uri[:40]!r}: {error}") from error


def _check_bytes(size: int, max_bytes: int) -> None:
    if size > max_bytes:
        raise UnusableMedium(Reason.LARGE, f"{size} bytes, allowed {max_bytes}")
