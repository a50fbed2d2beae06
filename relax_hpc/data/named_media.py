"""Media as a row names them: marks in texts, parts of chat messages, and where each content is."""

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

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.medium import Kind
from relax_hpc.data.multimodal.options import NO_OPTIONS, MediumOptions
from relax_hpc.data.multimodal.source import Source

Columns = dict[Kind, deque[Any]]
"""Media that a row names, by kind, in the order of their places: values for `reference_to`."""
_MARK = re.compile("(<image>|<video>|<audio>)")
_CONTENT = ("bytes", "path", "url", "base64", "data")
"""Keys of an object under which a content stands, or what names it."""
_IGNORED = frozenset(["type", "cache_control", "media_type", "format", "detail"])
"""Keys beside a content that change nothing here. The bytes say which format they have; `detail`
is checked."""
_DETAILS = (None, "auto", "high")
"""Values of OpenAI's `detail` that mean the image as it is."""


@dataclass(frozen=True, slots=True)
class MediumReference:
    """A medium that a row names."""

    value: Any
    """A path, URI or bytes, see `source_of`."""
    options: MediumOptions = NO_OPTIONS


def split_at_marks(text: str, kinds: Columns) -> Iterator[str | Kind]:
    """Texts of ``text``, and between them the kinds of media that have their places there.

    >>> list(split_at_marks("a<image>b<audio>", {Kind.IMAGE: deque()}))
    ['a', <Kind.IMAGE: 'image'>, 'b<audio>']
    """
    marks, before = {f"<{kind}>": kind for kind in kinds}, ""
    for piece in _MARK.split(text):
        if piece in marks:
            yield before
            yield marks[piece]
            before = ""
        else:
            before += piece
    yield before


def with_parts(
    messages: Sequence[Mapping[str, Any]], columns: Columns
) -> tuple[list[dict[str, Any]], Columns]:
    """Messages as a template takes them, with a part {"type"} for each medium; and all their media
    in order, from ``columns`` where a part or a mark names none itself. BadMedium: a part is of an
    unknown type, or has an unknown key."""
    layout = _Layout({kind: deque(values) for kind, values in columns.items()})
    laid_out = [
        {**message, "content": layout.content(message.get("content"))} for message in messages
    ]
    for kind, values in layout.waiting.items():
        layout.media[kind].extend(values)
    return laid_out, layout.media


class _Layout:
    """Media of the messages of one row, as they are met."""

    def __init__(self, columns: Columns) -> None:
        self.waiting = columns
        self.media: Columns = defaultdict(deque)

    def content(self, content: Any) -> Any:
        """``content`` of a message, a text or parts, with nothing of what its media hold."""
        if isinstance(content, str):
            parts = list(self._text_parts(content))
            return parts if any(part["type"] != "text" for part in parts) else content
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            if part.get("type") == "text":
                parts += self._text_parts(part["text"])
            else:
                kind = kind_of_part(part)
                parts.append(self._placed(kind, reference_in(kind, part)))
        return parts

    def _text_parts(self, text: str) -> Iterator[dict[str, Any]]:
        for piece in split_at_marks(text, self.waiting):
            if isinstance(piece, Kind):
                yield self._placed(piece, None)
            elif piece:
                yield {"type": "text", "text": piece}

    def _placed(self, kind: Kind, named: MediumReference | None) -> dict[str, Any]:
        """A part that is a place for a medium: the one it names, or the next of the columns."""
        if self.waiting.get(kind) and (named is None or named.value is None):
            value = self.waiting[kind].popleft()
            options = named.options if named else NO_OPTIONS
            named = reference_to(kind, value, options)
        if named is not None and named.value is not None:
            self.media[kind].append(named)
        return {"type": str(kind)}


def kind_of_part(part: Mapping[str, Any]) -> Kind:
    """Kind of the medium that a part of a message is, by its type, or where it has none by its
    keys. BadMedium: it is no medium."""
    for kind in Kind:
        names = _names_of(kind)
        if part.get("type") in names or (
            "type" not in part and any(name in part for name in names)
        ):
            return kind
    allowed = ", ".join(("text", *Kind))
    raise BadMedium(
        Reason.KIND, f"found a part of type {str(part.get('type'))[:40]!r}, allowed: {allowed}"
    )


def _names_of(kind: Kind) -> tuple[str, str, str]:
    """Names of parts, and of their contents, in Hugging Face's and OpenAI's forms."""
    return str(kind), f"{kind}_url", f"input_{kind}"


def reference_in(kind: Kind, part: Mapping[str, Any]) -> MediumReference:
    """Medium that a part names, with its options; its value is None where the columns of the row
    name it. BadMedium: it has a key that is not understood."""
    fields = {key: value for key, value in part.items() if value is not None and key != "type"}
    nested = [fields.pop(key) for key in (*_names_of(kind), "source") if key in fields]
    plain = {key: fields.pop(key) for key in _CONTENT if key in fields}
    contents = [*nested, *([plain] if plain else [])]
    if len(contents) > 1:
        raise BadMedium(Reason.URI, f"found {len(contents)} contents in one part, allowed: one")
    return reference_to(kind, contents[0] if contents else None, _options(kind, fields))


def reference_to(kind: Kind, value: Any, options: MediumOptions = NO_OPTIONS) -> MediumReference:
    """Medium that ``value`` names: a path, URI or bytes, or an object that has one of these and
    options of its entry_options. BadMedium: the object has a key that is not understood."""
    if isinstance(value, MediumReference):
        return value
    if not isinstance(value, Mapping):
        return MediumReference(value, options)
    fields = {key: entry for key, entry in value.items() if entry is not None}
    # `datasets` stores the bytes of a file beside the path that it had.
    contents = [_uri(key, fields.pop(key)) for key in _CONTENT if key in fields]
    entry_options = _options(kind, fields)
    chosen = options if entry_options == NO_OPTIONS else entry_options
    return MediumReference(contents[0] if contents else None, chosen)


def _uri(key: str, content: Any) -> Any:
    """``content`` that stands under ``key``; as a data URI where that key means base64."""
    if key in ("base64", "data") and isinstance(content, str) and not content.startswith("data:"):
        return f"data:;base64,{content}"
    return content


def _options(kind: Kind, fields: Mapping[str, Any]) -> MediumOptions:
    """Options among keys of a part. BadMedium: another key would be ignored."""
    if fields.get("detail") not in _DETAILS:
        raise BadMedium(Reason.OPTION, f"detail: found {fields['detail']!r}, allowed: auto, high")
    values = {key: value for key, value in fields.items() if key not in _IGNORED}
    return MediumOptions.from_mapping(kind, values)


def source_of(value: Any, folder: Path, most_bytes: int) -> Source:
    """Source of the medium that ``value`` names: a path relative to ``folder``, a file or data URI,
    or bytes. BadMedium: it names none that can be read here, or a row holds more than
    ``most_bytes`` of it, which are then not copied."""
    if isinstance(value, bytes):
        _check_bytes(len(value), most_bytes)
        return value
    if isinstance(value, list):
        raise BadMedium(Reason.URI, "found a list, such as frames of a video; allowed: one file")
    if not isinstance(value, str) or not value:
        raise BadMedium(
            Reason.URI,
            f"found {str(value)[:80]!r}, allowed: a path, file:// or data: URI, or bytes",
        )
    scheme = value[:8].partition(":")[0].lower()
    if scheme == "data":
        return _decoded(value, most_bytes)
    if scheme == "file":
        return folder / _path_of(value)
    if "://" in value[:12]:
        raise BadMedium(
            Reason.URI, f"found {value[:80]!r}; nothing is fetched from a network: name a file"
        )
    return folder / _without_nul(value)


def _path_of(uri: str) -> str:
    try:
        return _without_nul(unquote(urlsplit(uri).path))
    except ValueError as error:
        raise BadMedium(Reason.URI, f"found {uri[:80]!r}: {error}") from error


def _without_nul(path: str) -> str:
    if "\0" in path:
        raise BadMedium(Reason.URI, f"found {path[:80]!r}, allowed: a path without NUL")
    return path


def _decoded(uri: str, most_bytes: int) -> bytes:
    begin = uri.find(",") + 1
    # Four characters of base64 are three bytes, of which the last two may be missing.
    _check_bytes((len(uri) - begin) // 4 * 3 - 2, most_bytes)
    try:
        if not uri[: max(0, begin - 1)].endswith(";base64"):
            raise ValueError("expected data:TYPE;base64,DATA")
        return base64.b64decode(uri[begin:], validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadMedium(Reason.URI, f"data URI {uri[:40]!r}: {error}") from error


def _check_bytes(size: int, most_bytes: int) -> None:
    if size > most_bytes:
        raise BadMedium(Reason.LARGE, f"{size} bytes, allowed {most_bytes}")
