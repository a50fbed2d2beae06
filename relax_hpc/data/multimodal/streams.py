"""Streams of video and sound files, opened under an allow-list of containers and codecs.

FFmpeg also opens playlists, lists of files and network addresses. None of them is in the list, so
that a file of a data set can never make it read another file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.source import unreadable

if TYPE_CHECKING:
    from av import AudioStream, Packet, VideoStream
    from av.container import InputContainer
    from av.frame import Frame
    from av.stream import Stream

CONTAINERS = (
    *("mov", "matroska", "webm", "avi", "flv", "asf", "mpegts", "mpeg", "ogg", "gif"),
    *("wav", "w64", "aiff", "au", "caf", "flac", "mp3", "aac", "ac3", "eac3", "amr"),
)
"""FFmpeg's names of the containers that are read; `mov` is MP4, M4A, 3GP and QuickTime too."""
INTRA_CODECS = frozenset({"mjpeg", "prores", "dnxhd", "dvvideo", "huffyuv", "rawvideo", "png"})
"""Video codecs in which a packet is a whole frame, which depends on no other."""
VIDEO_CODECS = INTRA_CODECS | {
    *("h264", "hevc", "vp8", "vp9", "av1", "ffv1", "gif", "qtrle", "theora", "flv1", "h263"),
    *("mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"),
    # No FFmpeg encodes these two, so that no test compares them. Most WMV files use them.
    *("wmv3", "vc1"),
}
AUDIO_CODECS = frozenset(
    {
        *("aac", "alac", "mp2", "mp3", "ac3", "eac3", "flac", "opus", "vorbis", "speex"),
        *("wmav1", "wmav2", "amr_nb", "amr_wb", "adpcm_ms", "adpcm_ima_wav", "adpcm_g722"),
        *("pcm_u8", "pcm_s8", "pcm_mulaw", "pcm_alaw"),
        *("pcm_s16le", "pcm_s24le", "pcm_s32le", "pcm_f32le", "pcm_f64le"),
        *("pcm_s16be", "pcm_s24be", "pcm_s32be", "pcm_f32be", "pcm_f64be"),
    }
)
CUT_ANYWHERE = frozenset({"mpegts", "mpeg", "mp3", "aac", "ac3", "eac3"})
"""Containers that recorders and servers cut between any two bytes, and that taggers append to.
Packets that cannot be decoded before the first frame and after the last one are left out, as by
FFmpeg's own program."""
_OPTIONS = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "file"}
_WAV_PROBE_BYTES = 32768
"""FFmpeg 8.1 reads megabytes of each WAV file to see whether its samples are DTS: 22 ms, at this
limit 1 ms."""


@contextmanager
def open_container(path: str) -> Iterator[InputContainer]:
    """The container at ``path``. BadMedium: it is damaged, or of a format that is not in
    `CONTAINERS`."""
    # Before decord, here and wherever both are used: decord loads its own FFmpeg with RTLD_GLOBAL
    # (decord2 3.4.0), and a PyAV that is imported later binds to that one instead of the FFmpeg in
    # its wheel.
    import av

    options = dict(_OPTIONS)
    with Path(path).open("rb") as file:
        if file.read(12)[8:] == b"WAVE":
            options["probesize"] = str(_WAV_PROBE_BYTES)
    try:
        container = av.open(path, options=options, metadata_errors="ignore")
    except av.ArgumentError as error:  # FFmpeg's answer for a format outside format_whitelist
        raise BadMedium(
            Reason.UNSUPPORTED, f"allowed containers: {', '.join(CONTAINERS)}"
        ) from error
    except av.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise unreadable(path, str(error.strerror), ", ".join(CONTAINERS)) from error
    with container:
        yield container


def video_stream(container: InputContainer) -> VideoStream:
    """The video stream that FFmpeg's program chooses: the default, else the largest; no cover.

    BadMedium: the file has no video, or none with a codec of `VIDEO_CODECS`.
    """
    from av.stream import Disposition

    streams = [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic
    ]
    return _chosen(container, streams, VIDEO_CODECS, lambda stream: stream.width * stream.height)


def audio_stream(container: InputContainer) -> AudioStream:
    """The sound that FFmpeg's program chooses: the default, else the one of most channels.

    BadMedium: the file has no sound, or none with a codec of `AUDIO_CODECS`.
    """
    return _chosen(container, container.streams.audio, AUDIO_CODECS, lambda stream: stream.channels)


def _chosen(
    container: InputContainer,
    streams: Sequence[Stream],
    codecs: frozenset[str],
    size: Callable[[Stream], int],
) -> Stream:
    from av.stream import Disposition

    if not streams:
        raise BadMedium(Reason.NO_STREAM, f"none of its {len(container.streams)} streams")
    # Telephones write a second sound of a codec that FFmpeg does not decode.
    readable = [stream for stream in streams if codec_of(stream) in codecs]
    if not readable:
        present = ", ".join(codec_of(stream) or "unknown" for stream in streams)
        detail = f"codec {present}, allowed: {', '.join(sorted(codecs))}"
        raise BadMedium(Reason.UNSUPPORTED, f"{streams[0].type} {detail}")
    stream = max(
        readable, key=lambda stream: (bool(stream.disposition & Disposition.default), size(stream))
    )
    stream.codec_context.thread_count = 1
    return stream


def codec_of(stream: Stream) -> str:
    """FFmpeg's name of a codec, the same for all of its decoders; empty if it has no decoder."""
    context = stream.codec_context
    return context.codec.canonical_name if context else ""


def packets_of(container: InputContainer, stream: Stream) -> Iterator[Packet]:
    """Packets of a stream, then one without bytes, by which its decoder gives the frames that it
    still holds.

    Empty packets before the end stand for frames that a recorder dropped. They would end the
    decoding.
    """
    packet = None
    for packet in container.demux(stream):
        if packet.size:
            yield packet
    if packet is not None and not packet.size:
        yield packet


def decode(container: InputContainer, packets: Iterator[Packet]) -> Iterator[Frame]:
    """Frames of ``packets``, of one stream, in the order in which they are shown or heard.

    BadMedium: a packet cannot be decoded; see `CUT_ANYWHERE` for those that are left out.
    """
    import av

    is_cut = container.format.name in CUT_ANYWHERE
    has_frames, failure = False, None
    for packet in packets:
        try:
            frames = packet.decode()
        except av.FFmpegError as error:
            if isinstance(error, MemoryError):
                raise
            failure = error
            if not is_cut:
                raise _undecodable(failure) from failure
            continue
        if frames and failure and has_frames:
            raise _undecodable(failure) from failure
        if frames:
            has_frames, failure = True, None
        yield from frames
    if failure and not has_frames:
        raise _undecodable(failure) from failure


def _undecodable(error: Exception) -> BadMedium:
    return BadMedium(Reason.CORRUPTED, f"a packet cannot be decoded: {error}")
