"""Media as a row names them: marks in texts, parts of chat messages, and where each one's content is."""

from __future__ import annotations

import base64
import binascii
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.medium import Kind
from relax_hpc.multimodal.source import Source

Columns = dict[Kind, deque[Any]]
"""Media that the columns of a row name, by kind, in the order of its places."""
_MARK = re.compile("(<image>|<video>|<audio>)")


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


def with_parts(messages: Sequence[Mapping[str, Any]], columns: Columns) -> tuple[list[dict[str, Any]], Columns]:
    """Messages as a template takes them, a part for each medium and nothing of what it holds; and all their media, in
    order, those that no part names from ``columns``."""
    waiting = {kind: deque(some) for kind, some in columns.items()}
    found: Columns = defaultdict(deque)

    def part_of(kind: Kind, named: Any) -> dict[str, Any]:
        if named is None and waiting.get(kind):
            named = waiting[kind].popleft()
        if named is not None:
            found[kind].append(named)
        return {"type": str(kind)}

    def text_parts(text: str) -> Iterator[dict[str, Any]]:
        for piece in split_at_marks(text, columns):
            if isinstance(piece, Kind):
                yield part_of(piece, None)
            elif piece:
                yield {"type": "text", "text": piece}

    def parts_of(content: Any) -> Any:
        if isinstance(content, str):
            parts = list(text_parts(content))
            return parts if any(part["type"] != "text" for part in parts) else content
        if not isinstance(content, list):
            return content
        parts = []
        for part in content:
            kind = _kind_of(part)
            if kind:
                parts.append(part_of(kind, next((part[name] for name in _names(kind) if part.get(name)), None)))
            elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
                parts += text_parts(part["text"])
            else:
                parts.append(part)
        return parts

    laid_out = [{**message, "content": parts_of(message.get("content"))} for message in messages]
    for kind, rest in waiting.items():
        found[kind].extend(rest)
    return laid_out, found


def _kind_of(part: Any) -> Kind | None:
    """Kind of the medium that a part of a message is, by its type, as Hugging Face and OpenAI name them."""
    name = str(part.get("type", "")) if isinstance(part, Mapping) else ""
    return next((kind for kind in Kind if name in (str(kind), f"{kind}_url", f"input_{kind}")), None)


def _names(kind: Kind) -> tuple[str, ...]:
    """Names under which a part has its medium."""
    return str(kind), f"{kind}_url", "url", "path", "bytes"


def source_of(value: Any, folder: Path) -> Source:
    """Source of the medium that ``value`` names: a path relative to ``folder``, a file or data URI, or a mapping of one
    of these under `bytes`, `path` or `url`. BadMedium: it names none that can be had here."""
    if isinstance(value, Mapping):
        value = next((value[name] for name in ("bytes", "path", "url") if value.get(name)), None)
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise BadMedium(Reason.URI, f"found {str(value)[:80]!r}, allowed: a path, file:// or data: URI, or bytes")
    scheme = value[:8].partition(":")[0].lower()
    if scheme == "data":
        return _decoded(value)
    if scheme == "file":
        return Path(unquote(urlsplit(value).path))
    if "://" in value[:12]:
        raise BadMedium(Reason.URI, f"found {value[:80]!r}; nothing is fetched from a network: name a file")
    return folder / value


def _decoded(uri: str) -> bytes:
    head, comma, data = uri.partition(",")
    try:
        if not comma or not head.endswith(";base64"):
            raise ValueError("expected data:TYPE;base64,DATA")
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error) as error:
        raise BadMedium(Reason.URI, f"data URI {uri[:40]!r}: {error}") from error
