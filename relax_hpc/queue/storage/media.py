"""Media of prompts: stored once by content, named in the `spans` of samples, freed with the last
row that names them.

A blob lies in <run>/queue/media/ under the hash of its bytes, so all samples of a prompt group, and
all groups of the same prompt, share it. That hash (blake2b) is made once, by who stores it; behind
the bytes is a checksum (xxh3, ten times as fast) by which every process that reads them finds
damage, once. The controller counts who needs a blob, and removes it when nobody does::

    (media_id,) = store_media(client, ticket, [pixels])          # in rollout, once a prompt group
    row["spans"] = [{"kind": "image", "start": 3, "length": 64, "media_id": media_id}]
    row["media_tokens"] = {media_id: 64}         # as the engine's processor counted them
    client.put_generated(rows)
    claim = sound_claim(client, "actor", budget)  # in the trainer: bad rows are quarantined
    pixels = client.media.read(media_id)
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
import secrets
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
import xxhash

from relax_hpc.base.content_id import flat_bytes, hash_content
from relax_hpc.base.disk_waits import retry_write
from relax_hpc.base.rundir import sync_directory, write_atomic
from relax_hpc.data.media import places_of
from relax_hpc.queue.row_ids import ticket_of
from relax_hpc.queue.row_schema import BadRow, Row

KINDS = ("image", "video", "audio")
_ID = re.compile(r"[0-9a-f]{64}")
_TAIL_BYTES = 16
"""Bytes of the checksum behind a blob."""
_MAX_KNOWN = 1 << 16
"""Blobs that a process remembers to be sound: 20 MB."""
_GOING = ".going-"
"""Prefix of the name of a blob that `keep` is about to remove."""


class MediaError(OSError):
    """A blob that is missing, damaged or too large; the message names it."""


class BadMedia(BadRow):
    """A row whose media do not fit its tokens; ``reason`` is what its drop is counted under."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


def check_id(media_id: object) -> str:
    """``media_id``, if it is the hash of some content: 64 lower-case hex digits; else
    MediaError."""
    if not isinstance(media_id, str) or not _ID.fullmatch(media_id):
        raise MediaError(
            f"media id {str(media_id)[:80]!r}: expected the 64 lower-case hex digits that put() "
            "returns"
        )
    return media_id


class MediaStore:
    """Blobs of one run. Any number of processes may put, read and keep at the same time."""

    def __init__(
        self, folder: Path, durable: bool = True, max_bytes: int = 1 << 30, grace_s: float = 3600.0
    ) -> None:
        """``max_bytes``: of one blob. ``grace_s``: a blob stays so long after its last put, whoever
        names it; where the filesystem notes when a file was read, after that."""
        self.folder, self.durable, self.max_bytes, self.grace_s = (
            folder,
            durable,
            max_bytes,
            grace_s,
        )
        self._known: dict[str, tuple[int, ...]] = {}
        if not folder.exists():
            retry_write(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
            if durable:
                retry_write(folder, lambda: sync_directory(folder.parent))

    def put(self, data: bytes | memoryview | np.ndarray, media_id: str = "") -> str:
        """Store the bytes of ``data`` unless they are there, and say under which id; MediaError if
        they are too many. On a full disk it waits.

        ``media_id``: what `hash_content` has said, if it was asked; the bytes are not hashed
        again. The row that names the id must be accepted within ``grace_s``, or its media put
        again.
        """
        blob = flat_bytes(data)
        if not 0 < blob.nbytes <= self.max_bytes:
            raise MediaError(
                f"media of {blob.nbytes} bytes, allowed 1 to {self.max_bytes}; shrink it before "
                "the run"
            )
        media_id = check_id(media_id) if media_id else hash_content(blob)
        if not self._is_there(media_id):
            path, tail = self.folder / media_id, _checksum(blob)
            retry_write(path, lambda: write_atomic(path, blob, sync=self.durable, tail=tail))
            with contextlib.suppress(FileNotFoundError):
                self._remember(media_id, _identity(path.stat()))
        return media_id

    def _is_there(self, media_id: str) -> bool:
        """Whether the blob is stored whole; if so its grace begins again, and it is as durable as a
        fresh one."""
        path = self.folder / media_id
        try:
            # The time of its bytes stays: by it readers know that they have seen them.
            os.utime(path, ns=(self._now_ns(), path.stat().st_mtime_ns))
            self.read(media_id)
            if self.durable:
                with path.open("rb") as file:
                    os.fsync(file.fileno())
                sync_directory(self.folder)
        except OSError:
            return False
        return True

    def check(self, media_id: str) -> None:
        """MediaError if the blob is missing, or not what was put; as cheap as a look at the file
        once that is known."""
        path = self.folder / check_id(media_id)
        try:
            found = _identity(path.stat())
        except OSError as error:
            raise MediaError(f"{path}: {error}") from error
        if self._known.get(media_id) != found:
            self.read(media_id)

    def read(self, media_id: str, verify: bool = True) -> memoryview:
        """The blob's bytes, mapped read-only; MediaError if it is missing or, with ``verify``, not
        what was put.

        This store compares the bytes of a file that it has not written with their checksum once,
        and again when a file has changed.
        """
        path = self.folder / check_id(media_id)
        try:
            with path.open("rb") as file:
                found = _identity(os.fstat(file.fileno()))
                whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise MediaError(f"{path}: {error}") from error
        blob = whole[:-_TAIL_BYTES]
        if verify and self._known.get(media_id) != found:
            if _checksum(blob) != whole[-_TAIL_BYTES:]:
                raise MediaError(
                    f"{path}: damaged, {len(blob)} bytes that do not have the checksum behind them"
                )
            self._remember(media_id, found)
        return blob

    def _remember(self, media_id: str, found: tuple[int, ...]) -> None:
        self._known.pop(media_id, None)
        self._known[media_id] = found
        if len(self._known) > _MAX_KNOWN:
            self._known.pop(next(iter(self._known)), None)

    def keep(self, ids: Iterable[str]) -> list[str]:
        """Remove blobs that are not in ``ids``, the media of all rows that live, and whose grace is
        over.

        Returns what was removed. What writers that died have left goes as well. MediaError: not an
        id.
        """
        kept, limit = {check_id(media_id) for media_id in ids}, self._now_ns() / 1e9 - self.grace_s
        for going in self.folder.glob(f"{_GOING}*"):
            with contextlib.suppress(FileNotFoundError):
                going.replace(self.folder / going.name.removeprefix(_GOING))
        old = [name for name, changed in self._files() if name not in kept and changed < limit]
        return [name for name in old if self._remove(name, limit) and _ID.fullmatch(name)]

    def keep_only(self, ids: Iterable[str]) -> list[str]:
        """Remove all other blobs, however young: who needs one has named it before it was stored.
        Returns their ids."""
        others = sorted(self.sizes().keys() - set(ids))
        for media_id in others:
            (self.folder / media_id).unlink(missing_ok=True)
        self.keep(ids)
        return others

    def _remove(self, name: str, limit: float) -> bool:
        """Whether the file is gone. It is moved away first: has somebody just put it, its time
        tells, and it stays."""
        path, going = self.folder / name, self.folder / f"{_GOING}{name}"
        try:
            path.replace(going)
            if _last_put(going.stat()) >= limit:
                going.replace(path)
                return False
            going.unlink()
        except FileNotFoundError:
            return False
        return True

    def _now_ns(self) -> int:
        """Time by the clock of the filesystem, which stamps the blobs; a node's own may differ."""
        path = self.folder / f".now.{os.getpid()}.{secrets.token_hex(4)}"
        path.touch()
        try:
            return path.stat().st_mtime_ns
        finally:
            path.unlink()

    def _files(self) -> Iterator[tuple[str, float]]:
        with os.scandir(self.folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file():
                        yield entry.name, _last_put(entry.stat())

    def sizes(self) -> dict[str, int]:
        """Bytes by id of all blobs, for whoever bounds their sum."""
        found: dict[str, int] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _ID.fullmatch(path.name):
                    found[path.name] = path.stat().st_size - _TAIL_BYTES
        return found


def media_ids(rows: Iterable[Row]) -> set[str]:
    """Ids of the media that ``rows`` (with `spans`, checked) name."""
    return {span["media_id"] for row in rows for span in row["spans"]}


def media_by_ticket(rows: Iterable[Row]) -> dict[int, list[str]]:
    """Ids of the media that the rows of each prompt group name; BadMedia if a row's spans are not
    as the schema says."""
    found: dict[int, set[str]] = {}
    for row in rows:
        if named := {media_id for *_, media_id in _spans(row, len(row.get("token_ids", ())))}:
            found.setdefault(ticket_of(row["row_id"]), set()).update(named)
    return {ticket: sorted(ids) for ticket, ids in found.items()}


def placeholders_of(model: Path) -> dict[str, int]:
    """Token id of the placeholder by kind of medium, as config.json in a Hugging Face model
    directory names them.

    Empty for a text model, and where there is no such file.
    """
    return {str(kind): place.placeholder for kind, place in places_of(model).items()}


def check_media(row: Row, placeholders: Mapping[str, int] | None = None) -> int:
    """The media tokens of ``row``; BadMedia, with the reason, where its spans and its tokens do not
    agree.

    A span covers copies of one placeholder token, the same for every span of a kind, which the
    policy has not sampled; outside of the spans only the policy may have put one. ``placeholders``
    (token id by kind) says which they are, and finds rows that have lost their spans.
    `media_tokens`, if the row has it, is what whoever prepared the prompt has counted for each
    medium.
    """
    tokens, counts = np.asarray(row["token_ids"]), Counter[str]()
    sampled = (
        np.asarray(row.get("token_versions", row.get("loss_mask", np.zeros(len(tokens))))) != 0
    )
    known, inside = dict(placeholders or {}), np.zeros(len(tokens), bool)
    for kind, start, length, media_id in _spans(row, len(tokens)):
        place, end = known.setdefault(kind, int(tokens[start])), start + length
        if inside[start:end].any():
            raise _bad(row, f"{kind} span at {start} overlaps another one")
        if sampled[start:end].any() or (tokens[start:end] != place).any():
            fit = np.count_nonzero((tokens[start:end] == place) & ~sampled[start:end])
            raise _bad(
                row,
                f"{kind} span at {start} has {length} tokens, {fit} of them are the placeholder "
                f"{place}",
            )
        inside[start:end] = True
        counts[media_id] += length
    present = np.count_nonzero(np.isin(tokens, list(known.values())) & ~sampled)
    if present != counts.total():
        raise _bad(row, f"spans cover {counts.total()} media tokens, its tokens say {present}")
    _compare(row, counts, row.get("media_tokens", counts))
    return counts.total()


def _compare(row: Row, counts: Mapping[str, int], said: object) -> None:
    if not isinstance(said, Mapping):
        raise _bad(
            row,
            f"media_tokens: found {str(said)[:80]}, expected a number for each media id",
            "bad_span",
        )
    for media_id in sorted(counts.keys() | said.keys(), key=str):
        covered, claimed = counts.get(media_id, 0), said.get(media_id, 0)
        if covered != claimed:
            raise _bad(
                row, f"spans cover {covered} tokens of {media_id}, its media_tokens say {claimed}"
            )


def _spans(row: Row, tokens: int) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, length, media id) of each span; BadMedia if one is malformed, or leads out of
    the row."""
    if not isinstance(row.get("spans"), list):
        raise _bad(row, f"spans: found {str(row.get('spans'))[:200]}, expected a list", "bad_span")
    for span in row["spans"]:
        try:
            kind, start, length = span["kind"], span["start"], span["length"]
            check_id(span["media_id"])
        except (KeyError, TypeError, MediaError) as error:
            raise _bad(row, f"span {str(span)[:200]}: {error!r}", "bad_span") from error
        if kind not in KINDS or type(start) is not int or type(length) is not int:
            raise _bad(
                row,
                f"span {str(span)[:200]}: kind is one of {', '.join(KINDS)}, the rest integers",
                "bad_span",
            )
        if start < 0 or length < 1 or start + length > tokens:
            raise _bad(
                row, f"{kind} span of {length} tokens at {start} in a row of {tokens}", "bad_span"
            )
        yield kind, start, length, span["media_id"]


def _bad(row: Row, message: str, reason: str = "media_mismatch") -> BadMedia:
    return BadMedia(reason, f"{row.get('row_id', 'row')}: {message}")


def _checksum(blob: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(blob)


def _last_put(found: os.stat_result) -> float:
    """Time when a blob was stored, or put again."""
    return max(found.st_mtime, found.st_atime)


def _identity(found: os.stat_result) -> tuple[int, ...]:
    """Identity of a file's bytes: changes with another file under its name, or a write to it."""
    return found.st_ino, found.st_size, found.st_mtime_ns
