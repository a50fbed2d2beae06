"""Streams of video and sound files. Only containers and codecs of an allow-list are opened.

FFmpeg would also open playlists, lists of files and network addresses. These are not in the list,
so that a file of a data set can never make FFmpeg read another file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.source import unreadable

if TYPE_CHECKING:
    from av import AudioStream, Packet, VideoStream
    from av.container import InputContainer
    from av.frame import Frame
    from av.stream import Stream

S = TypeVar("S", bound="Stream")
CONTAINERS = (
    *("mov", "matroska", "webm", "avi", "flv", "asf", "mpegts", "mpeg", "ogg", "gif"),
    *("wav", "w64", "aiff", "au", "caf", "flac", "mp3", "aac", "ac3", "eac3", "amr"),
)
"""FFmpeg's names of the containers that are read; `mov` includes MP4, M4A, 3GP and QuickTime."""
INTRA_CODECS = frozenset({"mjpeg", "prores", "dnxhd", "dvvideo", "huffyuv", "rawvideo", "png"})
"""Video codecs in which a packet is a whole frame that depends on no other frame."""
VIDEO_CODECS = INTRA_CODECS | {
    *("h264", "hevc", "vp8", "vp9", "av1", "ffv1", "gif", "qtrle", "theora", "flv1", "h263"),
    *("mpeg1video", "mpeg2video", "mpeg4", "msmpeg4v2", "msmpeg4v3", "wmv1", "wmv2"),
    # FFmpeg has no encoder for these two, so that no test compares them. Most WMV files use them.
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
"""Containers that recorders and servers cut between any two bytes, and to which taggers append
data. Packets before the first frame or after the last one that cannot be decoded are skipped, like
in FFmpeg's program."""
_OPTIONS = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "file"}
_WAV_PROBE_BYTES = 32768
"""FFmpeg 8.1 reads megabytes of each WAV file to find out whether its samples are DTS, which takes
22 ms. With this limit it takes 1 ms."""


@contextmanager
def open_container(path: str) -> Iterator[InputContainer]:
    """The container at ``path``. UnusableMedium: it is damaged, or its format is not in
    `CONTAINERS`."""
    # PyAV must be imported before decord, here and elsewhere. decord2 3.4.0 loads its FFmpeg with
    # RTLD_GLOBAL, and a PyAV that is imported later uses that one instead of the FFmpeg in its
    # wheel.
    import av

    options = dict(_OPTIONS)
    with Path(path).open("rb") as file:
        if file.read(12)[8:] == b"WAVE":
            options["probesize"] = str(_WAV_PROBE_BYTES)
    try:
        container = av.open(path, options=options, metadata_errors="ignore")
    except av.ArgumentError as error:
        # FFmpeg 8.1 returns it for a format that is not in format_whitelist.
        raise UnusableMedium(
            Reason.UNSUPPORTED, f"allowed containers: {', '.join(CONTAINERS)}"
        ) from error
    except av.FFmpegError as error:
        if isinstance(error, MemoryError):
            raise
        raise unreadable(path, str(error.strerror), ", ".join(CONTAINERS)) from error
    with container:
        yield container


def video_stream(container: InputContainer) -> VideoStream:
    """The video stream that FFmpeg's program would choose: the default stream, otherwise the
    largest. Cover pictures do not count.

    UnusableMedium: the file has no video, or none with a codec of `VIDEO_CODECS`.
    """
    from av.stream import Disposition

    streams = [
        stream
        for stream in container.streams.video
        if not stream.disposition & Disposition.attached_pic
    ]
    return _choose_stream(
        container, streams, VIDEO_CODECS, lambda stream: stream.width * stream.height
    )


def audio_stream(container: InputContainer) -> AudioStream:
    """The audio stream that FFmpeg's program would choose: the default stream, otherwise the one
    with the most channels.

    UnusableMedium: the file has no sound, or none with a codec of `AUDIO_CODECS`.
    """
    return _choose_stream(
        container, container.streams.audio, AUDIO_CODECS, lambda stream: stream.channels
    )


def _choose_stream(
    container: InputContainer,
    streams: Sequence[S],
    codecs: frozenset[str],
    size: Callable[[S], int],
) -> S:
    """The default stream of those with a codec of ``codecs``, otherwise the one of most ``size``.
    It is decoded by one thread, because a node has many workers."""
    from av.stream import Disposition

    if not streams:
        raise UnusableMedium(Reason.NO_STREAM, f"none of its {len(container.streams)} streams")
    # Some phones write a second audio stream with a codec that FFmpeg cannot decode.
    readable = [stream for stream in streams if codec_of(stream) in codecs]
    if not readable:
        present = ", ".join(codec_of(stream) or "unknown" for stream in streams)
        detail = f"codec {present}, allowed: {', '.join(sorted(codecs))}"
        raise UnusableMedium(Reason.UNSUPPORTED, f"{streams[0].type} {detail}")
    stream = max(
        readable, key=lambda stream: (bool(stream.disposition & Disposition.default), size(stream))
    )
    stream.codec_context.thread_count = 1
    return stream


def codec_of(stream: Stream) -> str:
    """FFmpeg's name of a codec, equal for all decoders of the codec; empty if there is no
    decoder."""
    context = stream.codec_context
    return context.codec.canonical_name if context else ""


def packets_of(container: InputContainer, stream: Stream) -> Iterator[Packet]:
    """Packets of a stream, then an empty packet, for which its decoder returns the frames that it
    has buffered.

    Empty packets before the end, which recorders write for dropped frames, are skipped, because
    they would end the decoding.
    """
    packet = None
    for packet in container.demux(stream):
        if packet.size:
            yield packet
    if packet is not None and not packet.size:
        yield packet


def decode(container: InputContainer, packets: Iterable[Packet]) -> Iterator[Frame]:
    """Frames of ``packets``, of one stream, in the order in which they are shown or heard.

    UnusableMedium: a packet cannot be decoded; see `CUT_ANYWHERE` for those that are skipped.
    """
    import av

    is_cut = container.format.name in CUT_ANYWHERE
    has_frames = False
    failure: Exception | None = None
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


def _undecodable(error: Exception) -> UnusableMedium:
    return UnusableMedium(Reason.CORRUPTED, f"a packet cannot be decoded: {error}")
