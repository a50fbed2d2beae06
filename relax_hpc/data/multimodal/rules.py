"""Rules by which a family of models processes its media, read from the files of a model."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.multimodal.medium import Grid, Header, Kind, Medium
from relax_hpc.data.multimodal.sizes import Budget, Size, limit_aspect, resize_to_budget

IMAGE, CLIP = Budget(65536, 16777216), Budget(4096, 25165824)
"""Budgets of the published Qwen3-VL models."""
EVEN = (0.5, 0.5, 0.5)
"""Mean, and deviation, of the three channels in all Qwen3 models."""
MAX_PIXELS = 1 << 40
"""Upper bound of a budget without a limit."""
TOKENS_A_SECOND = 13
"""Tokens of one second of sound, which has 100 mel frames, in Qwen3-Omni."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by which a family's processor treats images, videos and sounds."""

    patch: int = 16
    """Side of a patch in pixels."""
    merge: int = 2
    """Side, in patches, of the square that becomes one token."""
    temporal: int = 2
    """Frames of a patch. The frame of an image is copied."""
    mean: tuple[float, ...] = EVEN
    std: tuple[float, ...] = EVEN
    factor: int = 32
    """Sides of images and frames are multiples of this number of pixels."""
    image: Budget = IMAGE
    """Pixels of an image."""
    frame: Budget | None = None
    """Pixels of each frame of a video."""
    clip: Budget | None = CLIP
    """Pixels of all frames of a video together."""
    fps: float = 2.0
    """Frames that are sampled in a second of video."""
    min_frames: int = 4
    max_frames: int = 768
    frame_factor: int = 1
    """The number of sampled frames is a multiple of this one."""
    stamped: bool = True
    """Whether time stamps stand, as text, before the temporal patches of a video. If not, the times
    are positions."""
    positions_a_second: float = 0.0
    """Positions of a second of video that is not `stamped`."""
    rate: int = 0
    """Sample rate of sounds in Hz; 0: the family has no audio input."""
    mel_bins: int = 128
    window: int = 400
    """Samples of a Fourier transform."""
    hop: int = 160
    """Samples from one mel frame to the next."""

    @classmethod
    def from_model(cls, directory: Path | str, settings: MultimodalConfig | None = None) -> Rules:
        """Rules of the Hugging Face model in ``directory``, with changes by ``settings``.

        ConfigError: the model supports no media, or not these settings.
        """
        config = Path(directory) / "config.json"
        model = read_json_object(config, is_optional=True)
        processors = read_json_object(config.with_name("processor_config.json"), is_optional=True)
        kind = model.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            allowed = ", ".join(FAMILIES)
            raise ConfigError(
                f"{config}: model_type is {kind!r}, which takes no media here; allowed: {allowed}"
            )
        image_settings = read_json_object(
            config.with_name("preprocessor_config.json"), is_optional=True
        )
        video_settings = read_json_object(
            config.with_name("video_preprocessor_config.json"), is_optional=True
        )
        try:
            image_processor = processors.get("image_processor", {})
            image_settings |= processors.get("feature_extractor", {}) | image_processor
            video_settings |= processors.get("video_processor", {})
            thinker = model.get("thinker_config", model)
            rules = FAMILIES[kind](thinker, image_settings, video_settings)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # The file may have values of any type.
            raise ConfigError(
                f"{config}: no rules of media: {error!r}; download the model again"
            ) from error
        return rules.with_settings(settings) if settings else rules

    of = from_model  # Name in release 0.1.

    def with_settings(self, settings: MultimodalConfig) -> Rules:
        """The rules with the changes of a configuration. ConfigError: the model does not support
        them."""
        factor, needed = settings.image_resize_scale_factor or self.factor, self.patch * self.merge
        if factor % needed:
            raise ConfigError(
                f"data.multimodal.image_resize_scale_factor: found {factor}, allowed: multiples "
                f"of the {needed} pixels of a token of this model, or 0"
            )
        if self.rate and settings.audio_sample_rate not in (0, self.rate):
            raise ConfigError(
                f"data.multimodal.audio_sample_rate: found {settings.audio_sample_rate}, allowed: "
                f"0, or {self.rate}, at which this model hears"
            )
        token = needed**2
        return dataclasses.replace(
            self,
            factor=factor,
            image=_override_budget(
                self.image,
                settings.image_min_token_num * token,
                settings.image_max_token_num * token,
            ),
            frame=_override_budget(
                self.frame,
                settings.video_min_token_num * token,
                settings.video_max_token_num * token,
            ),
            clip=_override_budget(self.clip, 0, settings.video_total_token_num * token),
            fps=settings.fps or self.fps,
            min_frames=settings.fps_min_frames or self.min_frames,
            max_frames=settings.fps_max_frames or self.max_frames,
            frame_factor=settings.frame_factor or self.frame_factor,
        )

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Rules:
        """The rules from ``values``, which were made by `dataclasses.asdict` and sent as JSON."""
        fields = dict(values)
        for name in ("image", "frame", "clip"):
            fields[name] = fields[name] and Budget(**fields[name])
        for name in ("mean", "std"):
            fields[name] = tuple(fields[name])
        return cls(**fields)

    def tokens(self, medium: Header | Medium) -> int:
        """Number of tokens of a medium in a prompt, without time stamps."""
        if medium.kind is Kind.AUDIO:
            return sound_tokens(medium.grid[2])
        return math.prod(medium.grid) // self.merge**2

    def image_size(self, size: Size) -> Size:
        """Size to which an image of ``size`` is resized."""
        return resize_to_budget(limit_aspect(size), self.factor, self.image)

    def frame_size(self, size: Size, frames: int) -> Size:
        """Size to which the frames of a video with ``frames`` sampled frames are resized."""
        frame_size = limit_aspect(size)
        if self.frame:
            frame_size = resize_to_budget(frame_size, self.factor, self.frame)
        if self.clip:
            padded = -(-frames // self.temporal) * self.temporal
            frame_size = resize_to_budget(frame_size, self.factor, self.clip, frames, padded)
        return frame_size

    def frames(self, total: int, native_fps: float) -> np.ndarray:
        """Numbers of the frames that are sampled in a video with ``total`` frames, int64
        [frames]."""
        wanted = min(
            max(int(total / native_fps * self.fps), self.min_frames), self.max_frames, total
        )
        count = max(wanted // self.frame_factor * self.frame_factor, min(self.frame_factor, total))
        return np.linspace(0, total - 1, count).round().astype(np.int64)

    def image_header(self, size: Size) -> Header:
        """Header of an image with the upright ``size``."""
        return Header(Kind.IMAGE, self._grid(1, self.image_size(size)))

    def video_header(self, total: int, native_fps: float, size: Size) -> Header:
        """Header of a video with ``total`` frames of ``size``."""
        sampled = self.frames(total, native_fps)
        grid = self._grid(-(-len(sampled) // self.temporal), self.frame_size(size, len(sampled)))
        return Header(Kind.VIDEO, grid, self.times(sampled, total, native_fps))

    def audio_header(self, samples: int) -> Header:
        """Header of a sound with ``samples`` at `rate`."""
        return Header(Kind.AUDIO, (1, 1, samples // self.hop))

    def times(self, sampled: np.ndarray, total: int, native_fps: float) -> tuple[float, ...]:
        """Seconds of each temporal patch. With time stamps: the middle between its first and its
        last frame. Otherwise: multiples of one interval, as if frames were sampled evenly."""
        patches = -(-len(sampled) // self.temporal)
        if not self.stamped:
            interval_s = self.temporal * total / native_fps / len(sampled)
            return tuple(number * interval_s for number in range(patches))
        padding = [sampled[-1]] * (-len(sampled) % self.temporal)
        seconds = np.append(sampled, padding) / native_fps
        middles = (seconds[:: self.temporal] + seconds[self.temporal - 1 :: self.temporal]) / 2
        return tuple(middles.tolist())

    def _grid(self, time: int, size: Size) -> Grid:
        return time, size[0] // self.patch, size[1] // self.patch


def sound_tokens(frames: int) -> int:
    """Number of tokens of ``frames`` mel frames: each second, also the last incomplete one, passes
    three convolutions of stride 2."""
    last_second = frames % 100
    for _ in range(3):
        last_second = (last_second + 1) // 2
    return last_second + frames // 100 * TOKENS_A_SECOND


B = TypeVar("B", Budget, Budget | None)


def _override_budget(budget: B, low: int, high: int) -> B | Budget:
    """``budget`` with another ``low`` or ``high`` bound in pixels, if these are not 0. If they
    contradict the other bound of ``budget``, that bound is moved."""
    if not (low or high):
        return budget
    default = budget or Budget(0, MAX_PIXELS)
    return Budget(low or min(default.low, high), high or max(default.high, low))


def _vision(model: Mapping[str, Any], image_settings: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Rules` for the vision tower. Settings of the image processor come first."""
    tower = model["vision_config"]
    patch, merge = tower.get("patch_size", 16), tower.get("spatial_merge_size", 2)
    return {
        "patch": patch,
        "merge": merge,
        "factor": patch * merge,
        "temporal": tower.get("temporal_patch_size", 2),
        "mean": tuple(image_settings.get("image_mean", EVEN)),
        "std": tuple(image_settings.get("image_std", EVEN)),
    }


def _budget(processor: Mapping[str, Any], default: Budget) -> Budget:
    size = processor.get("size") or {}
    low = processor.get("min_pixels") or size.get("shortest_edge") or default.low
    return Budget(low, processor.get("max_pixels") or size.get("longest_edge") or default.high)


def _sampling(video_settings: Mapping[str, Any]) -> dict[str, Any]:
    defaults = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    return {name: video_settings.get(name) or value for name, value in defaults.items()}


def _qwen3_vl(
    model: Mapping[str, Any],
    image_settings: Mapping[str, Any],
    video_settings: Mapping[str, Any],
) -> Rules:
    return Rules(
        **_vision(model, image_settings),
        **_sampling(video_settings),
        image=_budget(image_settings, IMAGE),
        clip=_budget(video_settings, CLIP),
    )


def _qwen3_omni(
    model: Mapping[str, Any],
    image_settings: Mapping[str, Any],
    video_settings: Mapping[str, Any],
) -> Rules:
    return Rules(
        **_vision(model, image_settings),
        **_sampling(video_settings),
        image=_budget(image_settings, Budget(3136, 12845056)),
        # The processor has these two as fixed defaults and does not read them from the model.
        frame=Budget(128 * 32 * 32, 768 * 32 * 32),
        clip=None,
        frame_factor=2,
        stamped=False,
        positions_a_second=float(model.get("position_id_per_seconds", TOKENS_A_SECOND)),
        rate=image_settings.get("sampling_rate", 16000),
        mel_bins=model["audio_config"].get("num_mel_bins", 128),
        window=image_settings.get("n_fft", 400),
        hop=image_settings.get("hop_length", 160),
    )


FAMILIES = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_omni_moe": _qwen3_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni,
}
"""`model_type` of a config.json -> function that makes the rules."""
_VISION_KINDS = (Kind.IMAGE, Kind.VIDEO)
KINDS_BY_FAMILY = {
    name: (*_VISION_KINDS, Kind.AUDIO) if family is _qwen3_omni else _VISION_KINDS
    for name, family in FAMILIES.items()
}
"""`model_type` -> kinds of media that the family supports."""
