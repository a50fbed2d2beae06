"""Settings of media in prompts: numbers of tokens, and limits of files."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class MultimodalConfig:
    """Media of prompts. With 0, budgets and frame settings follow the model's own processor."""

    image_min_token_num: int = bounded(0, 0)
    """Smallest number of tokens of an image. A smaller image is enlarged. Relax: 4."""
    image_max_token_num: int = bounded(0, 0)
    """Largest number of tokens of an image. A larger image is scaled down. Relax: 16384."""
    image_resize_scale_factor: int = bounded(0, 0)
    """Number of pixels of which the sides of images and frames are multiples. It must be a multiple
    of what the model needs, patch size times merge size: 32 in the Qwen3 families. 0 means that
    number."""
    video_min_token_num: int = bounded(0, 0)
    """Smallest number of tokens of a frame, counted as for an image. Relax: 128."""
    video_max_token_num: int = bounded(0, 0)
    """Largest number of tokens of a frame. Relax: 768."""
    video_total_token_num: int = bounded(0, 0)
    """Largest number of tokens of all frames of a video together, counted as for images. The prompt
    has half as many, because two frames share their tokens."""
    fps: float = bounded(0.0, 0.0)
    """Number of frames that are used of each second of video. Relax: 2."""
    fps_min_frames: int = bounded(0, 0)
    """Smallest number of frames that are used of a video, if it has them. Relax: 4."""
    fps_max_frames: int = bounded(0, 0)
    """Largest number of frames that are used of a video. Relax: 768."""
    frame_factor: int = bounded(0, 0)
    """The number of used frames is a multiple of this number. Relax: 2."""
    use_audio_in_video: bool = False
    """Whether models with an audio tower also get the sound of a video, in alternation with its
    frames. A video without sound is used without it. Relax: the same name."""
    audio_sample_rate: int = bounded(0, 0)
    """Samples per second to which sounds are resampled. It must be the rate of the model's
    processor, otherwise the run is refused. 0 means that rate. Relax: 16000, the rate of
    Qwen3-Omni."""
    mm_processor_pool_size: int = bounded(1, 1)
    """Maximum number of processes in which each process of rollout decodes files during
    generation."""
    ahead_mb: int = bounded(512, 0)
    """Megabytes of media of the next prompts that each process of rollout decodes in advance, while
    no request waits for other media. It is unknown which of several processes will use a prompt, so
    each process decodes it. With 0 nothing is decoded in advance."""
    max_file_mb: int = bounded(2048, 1)
    """Maximum size of a file in megabytes. A file beyond this limit, or beyond one of the next
    four, is refused when its header is read."""
    max_pixels: int = bounded(1 << 26, 1)
    """Maximum number of pixels of an image or a frame."""
    max_frames: int = bounded(1 << 17, 1)
    """Maximum number of frames of a video, used or not."""
    max_seconds: float = bounded(3600.0, 0.1)
    """Maximum duration of a video or a sound in seconds."""
    max_sample_rate: int = bounded(768_000, 1000)
    """Maximum number of samples per second of a sound file. It is then resampled to the model's
    rate."""
    file_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for a file. Beyond them the process is replaced, and the file counts as bad."""
    memory_mb: int = bounded(4096, 64)
    """Maximum memory of a decoding process in megabytes."""
