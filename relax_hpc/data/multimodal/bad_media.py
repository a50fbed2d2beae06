"""Reasons why a medium of a prompt cannot be used. The media store adds `media_too_large`, and the
queue `media_missing`.

When the prompt file is indexed, the headers of media are read; a row with such a medium is left out
and counted under the reason. A broken body is found during rollout.
If more than the share `data.max_bad_share` of the rows is bad, the run does not start. During
rollout, the prompt group fails with this reason, and another prompt takes its ticket. If more than
the share `rollout.max_failed_share` of the last groups fails (`Outcomes.check_share`), the run ends
with exit code 93.
"""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """Reason under which a bad medium is counted."""

    MISSING = "missing_file"
    EMPTY = "empty_file"
    """No bytes, or a header without samples."""
    LARGE = "large_file"
    """More bytes than `max_bytes`."""
    URI = "bad_uri"
    """Neither path, file URI nor data URI; or a data URI whose content cannot be decoded."""
    MISLABELLED = "mislabelled"
    """Content of another kind than in the prompt: a sound instead of an image, a page of HTML."""
    EXTENSION = "wrong_extension"
    """Content of the right kind in a file whose extension means another kind."""
    UNSUPPORTED = "unsupported_format"
    """A format, codec or range of values that no decoder of the allow-list reads correctly."""
    CORRUPTED = "corrupted"
    TRUNCATED = "truncated"
    """Shorter than the file's header says. A decoder reports it, or a comparison finds it."""
    NO_STREAM = "no_stream"
    """A container without a video, or without sound."""
    PIXELS = "too_many_pixels"
    SECONDS = "too_long"
    SHORT = "too_short"
    FRAMES = "too_many_frames"
    RATE = "bad_sample_rate"
    NOT_FINITE = "not_finite"
    """NaN or infinity among the samples of a sound."""
    HUNG = "decoder_hung"
    """Decoding exceeded the time limit of a file; its worker was killed."""
    MEMORY = "decoder_memory"
    """Decoding exceeded the memory limit of a worker."""
    DIED = "decoder_died"
    """The worker that decoded it ended."""
    KIND = "kind_not_taken"
    """A kind of medium that the model does not support."""
    BLOB = "damaged_blob"
    """Stored bytes that are not a medium."""
    OPTION = "bad_option"
    """An option of a part, such as `max_pixels`, that is unknown or has an invalid value."""
    SPANS = "media_mismatch"
    """Spans or placeholders that do not fit the media."""


class UnusableMedium(Exception):
    """A medium that cannot be used."""

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason, self.detail = reason, detail


BadMedium = UnusableMedium  # Name in release 0.1.
