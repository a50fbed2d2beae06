"""Settings of media in prompts: how many tokens they may have, and what a file may take."""

from __future__ import annotations

from dataclasses import dataclass

from relax_hpc.base.settings import bounded


@dataclass(kw_only=True, slots=True)
class MultimodalConfig:
    """Media of prompts. 0 of a budget, or of frames, is what the model's own processor does."""

    image_min_token_num: int = bounded(0, 0)
    """Tokens of an image at least; a smaller one is enlarged. Relax: 4."""
    image_max_token_num: int = bounded(0, 0)
    """Tokens of an image at most; a larger one is made smaller. Relax: 16384."""
    image_resize_scale_factor: int = bounded(0, 0)
    """Pixels of which the sides of images and frames are multiples: itself a multiple of what the
    model needs, patch times merge, 32 in Qwen3's families, which is what 0 means."""
    video_min_token_num: int = bounded(0, 0)
    """Tokens of a frame at least, as if it was an image. Relax: 128."""
    video_max_token_num: int = bounded(0, 0)
    """Tokens of a frame at most. Relax: 768."""
    video_total_token_num: int = bounded(0, 0)
    """Tokens of all frames of a video together at most, each as if it was an image: a prompt has
    half as many, as two frames share theirs."""
    fps: float = bounded(0.0, 0.0)
    """Frames of a second of video that are taken. Relax: 2."""
    fps_min_frames: int = bounded(0, 0)
    """Frames of a video that are taken at least, if it has them. Relax: 4."""
    fps_max_frames: int = bounded(0, 0)
    """Frames of a video that are taken at most. Relax: 768."""
    frame_factor: int = bounded(0, 0)
    """Frames that are taken are a multiple of it. Relax: 2."""
    use_audio_in_video: bool = False
    """Whether the sound of a video is heard too, by models that hear, in turns with its frames; a
    video without sound is seen alone. Relax: the same name."""
    audio_sample_rate: int = bounded(0, 0)
    """Samples of a second to which sounds are resampled: the rate that the model's processor has,
    which is what 0 means, or the run is refused. Relax: 16000, which is that of Qwen3-Omni."""
    mm_processor_pool_size: int = bounded(1, 1)
    """Processes, at most, in which each process of rollout has files decoded, beside generation."""
    ahead_mb: int = bounded(512, 0)
    """Megabytes of media of the next prompts that each process of rollout has decoded before they
    are drawn, while nobody waits for others. Which of several processes will draw a prompt is not
    known: each of them decodes it. 0: none are decoded ahead."""
    max_file_mb: int = bounded(2048, 1)
    """Megabytes of a file. One that is beyond this limit, or the next four, is refused by its
    header."""
    max_pixels: int = bounded(1 << 26, 1)
    """Pixels of an image or a frame."""
    max_frames: int = bounded(1 << 17, 1)
    """Frames of a video, whether they are taken or not."""
    max_seconds: float = bounded(3600.0, 0.1)
    """Seconds of a video or a sound."""
    max_sample_rate: int = bounded(768_000, 1000)
    """Samples of a second of sound in a file, which is then resampled to the model's rate."""
    file_timeout_s: float = bounded(60.0, 0.1)
    """Seconds for a file; past them its process is replaced, and the file is bad."""
    memory_mb: int = bounded(4096, 64)
    """Megabytes that a process may take for a file."""
