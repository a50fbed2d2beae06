"""Media of prompts: stored once by content, referred to by the `spans` of rows, and deleted after
the last row that refers to them.

A blob is a file in <run>/queue/media/, named by the hash of its bytes. So all samples of a prompt
group, and all groups of the same prompt, share it. The process that stores a blob computes the hash
(blake2b) once. After the bytes there is a checksum (xxh3, ten times as fast), by which every
process checks a blob once before it uses it. The controller counts the users of a blob, and deletes
it after the last one::

    (media_id,) = store_media(client, ticket, [pixels])          # in rollout, once per prompt group
    row["spans"] = [{"kind": "image", "start": 3, "length": 64, "media_id": media_id}]
    row["media_tokens"] = {media_id: 64}         # as the engine's processor counted them
    client.put_generated(rows)
    claim = claim_valid(client, "actor", budget)  # in the trainer: invalid rows are quarantined
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
from relax_hpc.data.media import read_placeholder_tokens
from relax_hpc.queue.row_ids import ticket_of
from relax_hpc.queue.row_schema import BadRow, Row

KINDS = ("image", "video", "audio")
_ID = re.compile(r"[0-9a-f]{64}")
_TAIL_BYTES = 16
"""Bytes of the checksum after a blob."""
_MAX_VERIFIED = 1 << 16
"""Most blobs that a process remembers as verified: 20 MB."""
_REMOVING = ".going-"
"""Prefix of the name of a blob that `remove_unused` is about to delete."""


class MediaError(OSError):
    """A blob that is missing, damaged or too large; the message names it."""


class MediaMismatch(BadRow):
    """A row whose media do not match its tokens. Its drop is counted under ``reason``."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


BadMedia = MediaMismatch  # Name in release 0.1.


def check_id(media_id: object) -> str:
    """``media_id``, if it is the hash of some content: 64 lower-case hex digits. Else
    MediaError."""
    if not isinstance(media_id, str) or not _ID.fullmatch(media_id):
        raise MediaError(
            f"media id {str(media_id)[:80]!r}: expected the 64 lower-case hex digits that put() "
            "returns"
        )
    return media_id


class MediaStore:
    """Blobs of one run. Several processes may put, read and remove at the same time."""

    def __init__(
        self, folder: Path, durable: bool = True, max_bytes: int = 1 << 30, grace_s: float = 3600.0
    ) -> None:
        """``max_bytes``: of one blob. ``grace_s``: time after its last put for which a blob is
        kept, even without users; on a filesystem that records reads, after its last read."""
        self.folder, self.durable = folder, durable
        self.max_bytes, self.grace_s = max_bytes, grace_s
        self._verified: dict[str, tuple[int, ...]] = {}
        if not folder.exists():
            retry_write(folder, lambda: folder.mkdir(parents=True, exist_ok=True))
            if durable:
                retry_write(folder, lambda: sync_directory(folder.parent))

    def put(self, data: bytes | memoryview | np.ndarray, media_id: str = "") -> str:
        """Store the bytes of ``data`` unless they exist already; their id. MediaError: they are too
        many. If the disk is full, it waits.

        ``media_id``: result of `hash_content`, so that the bytes are not hashed again. The row that
        refers to the id must be accepted within ``grace_s``, or its media put again.
        """
        blob = flat_bytes(data)
        if not 0 < blob.nbytes <= self.max_bytes:
            raise MediaError(
                f"media of {blob.nbytes} bytes, allowed 1 to {self.max_bytes}; shrink it before "
                "the run"
            )
        media_id = check_id(media_id) if media_id else hash_content(blob)
        if not self._renew(media_id):
            path, tail = self.folder / media_id, _checksum(blob)
            retry_write(path, lambda: write_atomic(path, blob, sync=self.durable, tail=tail))
            with contextlib.suppress(FileNotFoundError):
                self._remember(media_id, _identity(path.stat()))
        return media_id

    def _renew(self, media_id: str) -> bool:
        """Whether the blob is stored undamaged. If so, its grace starts again, and it is as durable
        as a new one."""
        path = self.folder / media_id
        try:
            # The modification time does not change, because readers identify verified bytes by it.
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
        """MediaError: the blob is missing or damaged. For a verified blob this only reads the
        file's status."""
        path = self.folder / check_id(media_id)
        try:
            identity = _identity(path.stat())
        except OSError as error:
            raise MediaError(f"{path}: {error}") from error
        if self._verified.get(media_id) != identity:
            self.read(media_id)

    def read(self, media_id: str, verify: bool = True) -> memoryview:
        """The blob's bytes, mapped read-only. MediaError: it is missing or, with ``verify``,
        damaged.

        The store compares a file that it has not written itself with the checksum once, and again
        if the file has changed.
        """
        path = self.folder / check_id(media_id)
        try:
            with path.open("rb") as file:
                identity = _identity(os.fstat(file.fileno()))
                whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (OSError, ValueError) as error:
            raise MediaError(f"{path}: {error}") from error
        blob = whole[:-_TAIL_BYTES]
        if verify and self._verified.get(media_id) != identity:
            if _checksum(blob) != whole[-_TAIL_BYTES:]:
                raise MediaError(
                    f"{path}: damaged: its {len(blob)} bytes do not match the checksum after them"
                )
            self._remember(media_id, identity)
        return blob

    def _remember(self, media_id: str, identity: tuple[int, ...]) -> None:
        self._verified.pop(media_id, None)
        self._verified[media_id] = identity
        if len(self._verified) > _MAX_VERIFIED:
            self._verified.pop(next(iter(self._verified)), None)

    def remove_unused(self, used_ids: Iterable[str]) -> list[str]:
        """Delete blobs that are not in ``used_ids``, the media of all existing rows, and whose
        grace is over.

        Returns the ids of deleted blobs. Temporary files of dead writers are deleted too.
        MediaError: an id is malformed.
        """
        used = {check_id(media_id) for media_id in used_ids}
        limit = self._now_ns() / 1e9 - self.grace_s
        for moved in self.folder.glob(f"{_REMOVING}*"):
            with contextlib.suppress(FileNotFoundError):
                moved.replace(self.folder / moved.name.removeprefix(_REMOVING))
        old = [name for name, changed in self._files() if name not in used and changed < limit]
        removed = [name for name in old if self._remove(name, limit)]
        return [name for name in removed if _ID.fullmatch(name)]

    def remove_all_except(self, used_ids: Iterable[str]) -> list[str]:
        """Delete all other blobs, even new ones: users are registered before a blob is stored.
        Returns the ids of deleted blobs."""
        unused = sorted(self.sizes().keys() - set(used_ids))
        for media_id in unused:
            (self.folder / media_id).unlink(missing_ok=True)
        self.remove_unused(used_ids)
        return unused

    def _remove(self, name: str, limit: float) -> bool:
        """Delete the file; whether it is deleted. It is renamed first: if another process has just
        put it again, its time shows that, and it is renamed back."""
        path, moved = self.folder / name, self.folder / f"{_REMOVING}{name}"
        try:
            path.replace(moved)
            if _last_put(moved.stat()) >= limit:
                moved.replace(path)
                return False
            moved.unlink()
        except FileNotFoundError:
            return False
        return True

    def _now_ns(self) -> int:
        """Time by the clock of the filesystem, which sets the times of blobs. A node's clock may
        differ."""
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
        """Bytes of each blob by id, to bound their sum."""
        sizes: dict[str, int] = {}
        for path in self.folder.iterdir():
            with contextlib.suppress(FileNotFoundError):
                if _ID.fullmatch(path.name):
                    sizes[path.name] = path.stat().st_size - _TAIL_BYTES
        return sizes


def media_ids(rows: Iterable[Row]) -> set[str]:
    """Ids of the media to which ``rows`` (with valid `spans`) refer."""
    ids: set[str] = set()
    for row in rows:
        ids.update(span["media_id"] for span in row["spans"])
    return ids


def media_by_ticket(rows: Iterable[Row]) -> dict[int, list[str]]:
    """Ids of the media to which the rows of each prompt group refer. MediaMismatch: a row's spans
    do not match the schema."""
    ids_by_ticket: dict[int, set[str]] = {}
    for row in rows:
        ids = {media_id for *_, media_id in _spans(row, len(row.get("token_ids", ())))}
        if ids:
            ids_by_ticket.setdefault(ticket_of(row["row_id"]), set()).update(ids)
    return {ticket: sorted(ids) for ticket, ids in ids_by_ticket.items()}


def read_placeholders(model: Path) -> dict[str, int]:
    """Token id of the placeholder by kind of medium, from config.json in a Hugging Face model
    directory.

    Empty for a text model, and if the file does not exist.
    """
    return {
        str(kind): medium.placeholder for kind, medium in read_placeholder_tokens(model).items()
    }


def check_media(row: Row, placeholders: Mapping[str, int] | None = None) -> int:
    """Number of media tokens in ``row``. MediaMismatch, with a reason: its spans and its tokens do
    not match.

    A span covers copies of one placeholder token, the same for every span of a kind. The policy has
    not sampled them. Outside of the spans, only the policy may have sampled placeholders.
    ``placeholders`` (token id by kind) also finds rows that have lost their spans. `media_tokens`,
    if the row has it, is the number of tokens of each medium as counted when the prompt was
    prepared.
    """
    tokens, counts = np.asarray(row["token_ids"]), Counter[str]()
    sampled = (
        np.asarray(row.get("token_versions", row.get("loss_mask", np.zeros(len(tokens))))) != 0
    )
    tokens_by_kind, inside = dict(placeholders or {}), np.zeros(len(tokens), bool)
    for kind, start, length, media_id in _spans(row, len(tokens)):
        placeholder, end = tokens_by_kind.setdefault(kind, int(tokens[start])), start + length
        if inside[start:end].any():
            raise _bad(row, f"{kind} span at {start} overlaps another one")
        if sampled[start:end].any() or (tokens[start:end] != placeholder).any():
            fit = np.count_nonzero((tokens[start:end] == placeholder) & ~sampled[start:end])
            raise _bad(
                row,
                f"{kind} span at {start} has {length} tokens, {fit} of them are the placeholder "
                f"{placeholder}",
            )
        inside[start:end] = True
        counts[media_id] += length
    is_placeholder = np.isin(tokens, list(tokens_by_kind.values()))
    present = np.count_nonzero(is_placeholder & ~sampled)
    if present != counts.total():
        raise _bad(
            row, f"spans cover {counts.total()} media tokens, the row has {present} placeholders"
        )
    _compare(row, counts, row.get("media_tokens", counts))
    return counts.total()


def _compare(row: Row, counts: Mapping[str, int], media_tokens: object) -> None:
    """MediaMismatch: spans cover other numbers of tokens than ``media_tokens`` of the row."""
    if not isinstance(media_tokens, Mapping):
        raise _bad(
            row,
            f"media_tokens: found {str(media_tokens)[:80]}, expected a number for each media id",
            "bad_span",
        )
    for media_id in sorted(counts.keys() | media_tokens.keys(), key=str):
        covered, expected = counts.get(media_id, 0), media_tokens.get(media_id, 0)
        if covered != expected:
            raise _bad(
                row, f"spans cover {covered} tokens of {media_id}, media_tokens has {expected}"
            )


def _spans(row: Row, tokens: int) -> Iterator[tuple[str, int, int, str]]:
    """(kind, start, length, media id) of each span. MediaMismatch: a span is malformed, or leaves
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
                f"span {str(span)[:200]}: kind is one of {', '.join(KINDS)}, start and length "
                "are integers",
                "bad_span",
            )
        if start < 0 or length < 1 or start + length > tokens:
            raise _bad(
                row, f"{kind} span of {length} tokens at {start} in a row of {tokens}", "bad_span"
            )
        yield kind, start, length, span["media_id"]


def _bad(row: Row, message: str, reason: str = "media_mismatch") -> MediaMismatch:
    return MediaMismatch(reason, f"{row.get('row_id', 'row')}: {message}")


def _checksum(blob: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(blob)


def _last_put(status: os.stat_result) -> float:
    """Time of the last put of a blob, or of its last read."""
    return max(status.st_mtime, status.st_atime)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    """Identity of a file's bytes: it changes if the file is replaced or written."""
    return status.st_ino, status.st_size, status.st_mtime_ns
