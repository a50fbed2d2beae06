"""Rules by which a family of models wants its media, read from a model's own files."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.config.schema import MultimodalConfig
from relax_hpc.data.multimodal.medium import Grid, Header, Kind, Medium
from relax_hpc.data.multimodal.sizes import Budget, Size, resized, squeezed

IMAGE, CLIP = Budget(65536, 16777216), Budget(4096, 25165824)
"""Budgets of the published Qwen3-VL models."""
EVEN = (0.5, 0.5, 0.5)
"""Mean, and deviation, of the three channels in all of Qwen3's models."""
MOST_PIXELS = 1 << 40
"""Pixels of a budget without a bound."""
TOKENS_A_SECOND = 13
"""Tokens of a second of sound, 100 mel frames, in Qwen3-Omni."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules by which a family's processor treats images, videos and sounds."""

    patch: int = 16
    """Pixels of a side of a patch."""
    merge: int = 2
    """Patches of a side of the square that becomes one token."""
    temporal: int = 2
    """Frames of a patch; of an image, its copies."""
    mean: tuple[float, ...] = EVEN
    std: tuple[float, ...] = EVEN
    factor: int = 32
    """Pixels of which a side is a multiple."""
    image: Budget = IMAGE
    """Pixels of an image."""
    frame: Budget | None = None
    """Pixels of each frame of a video."""
    clip: Budget | None = CLIP
    """Pixels of all frames of a video together."""
    fps: float = 2.0
    """Frames of a second of video that are taken."""
    min_frames: int = 4
    max_frames: int = 768
    frame_factor: int = 1
    """Frames that are taken are a multiple of it."""
    stamped: bool = True
    """Whether time stamps stand between the temporal patches of a video, as text. If not, their
    times are positions."""
    positions_a_second: float = 0.0
    """Positions of a second of video that is not `stamped`."""
    rate: int = 0
    """Samples of a second of sound; 0: the family hears nothing."""
    mel_bins: int = 128
    window: int = 400
    """Samples of a Fourier transform."""
    hop: int = 160
    """Samples from one mel frame to the next."""

    @classmethod
    def of(cls, directory: Path | str, settings: MultimodalConfig | None = None) -> Rules:
        """Rules of the Hugging Face model in ``directory``, changed by ``settings``.

        ConfigError: it takes no media, or not such.
        """
        config = Path(directory) / "config.json"
        model = read_json_object(config, is_optional=True)
        together = read_json_object(config.with_name("processor_config.json"), is_optional=True)
        kind = model.get("model_type")
        if not isinstance(kind, str) or kind not in FAMILIES:
            allowed = ", ".join(FAMILIES)
            raise ConfigError(
                f"{config}: model_type is {kind!r}, which takes no media here; allowed: {allowed}"
            )
        pictures = read_json_object(config.with_name("preprocessor_config.json"), is_optional=True)
        videos = read_json_object(
            config.with_name("video_preprocessor_config.json"), is_optional=True
        )
        try:
            pictures |= together.get("feature_extractor", {}) | together.get("image_processor", {})
            videos |= together.get("video_processor", {})
            rules = FAMILIES[kind](model.get("thinker_config", model), pictures, videos)
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
            # Values of types that no published model has.
            raise ConfigError(
                f"{config}: no rules of media: {error!r}; download the model again"
            ) from error
        return rules.changed(settings) if settings else rules

    def changed(self, settings: MultimodalConfig) -> Rules:
        """The rules as a configuration changes them. ConfigError: the model cannot take that."""
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
            image=_changed(
                self.image,
                settings.image_min_token_num * token,
                settings.image_max_token_num * token,
            ),
            frame=_changed(
                self.frame,
                settings.video_min_token_num * token,
                settings.video_max_token_num * token,
            ),
            clip=_changed(self.clip, 0, settings.video_total_token_num * token),
            fps=settings.fps or self.fps,
            min_frames=settings.fps_min_frames or self.min_frames,
            max_frames=settings.fps_max_frames or self.max_frames,
            frame_factor=settings.frame_factor or self.frame_factor,
        )

    @classmethod
    def rebuilt(cls, tree: Mapping[str, Any]) -> Rules:
        """The rules that `dataclasses.asdict`, and then JSON, has made ``tree`` of."""
        budgets = {name: tree[name] and Budget(**tree[name]) for name in ("image", "frame", "clip")}
        return cls(**{**tree, **budgets, "mean": tuple(tree["mean"]), "std": tuple(tree["std"])})

    def tokens(self, medium: Header | Medium) -> int:
        """Tokens of a medium in a prompt, time stamps not counted."""
        if medium.kind is Kind.AUDIO:
            return sound_tokens(medium.grid[2])
        return math.prod(medium.grid) // self.merge**2

    def image_size(self, size: Size) -> Size:
        """Size to which an image of ``size`` is resized."""
        return resized(squeezed(size), self.factor, self.image)

    def frame_size(self, size: Size, frames: int) -> Size:
        """Size to which the frames of a video are resized that has ``frames`` of them."""
        found = squeezed(size)
        if self.frame:
            found = resized(found, self.factor, self.frame)
        if self.clip:
            padded = -(-frames // self.temporal) * self.temporal
            found = resized(found, self.factor, self.clip, frames, padded)
        return found

    def frames(self, total: int, native_fps: float) -> np.ndarray:
        """Numbers of the frames that are taken of a video that has ``total``, int64 [frames]."""
        wanted = min(
            max(int(total / native_fps * self.fps), self.min_frames), self.max_frames, total
        )
        count = max(wanted // self.frame_factor * self.frame_factor, min(self.frame_factor, total))
        return np.linspace(0, total - 1, count).round().astype(np.int64)

    def image_header(self, size: Size) -> Header:
        """Header of an image that has ``size`` pixels once it stands upright."""
        return Header(Kind.IMAGE, self._grid(1, self.image_size(size)))

    def video_header(self, total: int, native_fps: float, size: Size) -> Header:
        """Header of a video of ``total`` frames of ``size`` pixels."""
        taken = self.frames(total, native_fps)
        grid = self._grid(-(-len(taken) // self.temporal), self.frame_size(size, len(taken)))
        return Header(Kind.VIDEO, grid, self.times(taken, total, native_fps))

    def audio_header(self, samples: int) -> Header:
        """Header of a sound that has ``samples`` at `rate`."""
        return Header(Kind.AUDIO, (1, 1, samples // self.hop))

    def times(self, taken: np.ndarray, total: int, native_fps: float) -> tuple[float, ...]:
        """Seconds of each temporal patch: the middle of its frames where they are stamps, else
        multiples of the time between two, as it would be if frames were drawn evenly."""
        if not self.stamped:
            apart = self.temporal * total / native_fps / len(taken)
            return tuple(number * apart for number in range(-(-len(taken) // self.temporal)))
        filled = np.append(taken, [taken[-1]] * (-len(taken) % self.temporal)) / native_fps
        return tuple(
            ((filled[:: self.temporal] + filled[self.temporal - 1 :: self.temporal]) / 2).tolist()
        )

    def _grid(self, time: int, size: Size) -> Grid:
        return time, size[0] // self.patch, size[1] // self.patch


def sound_tokens(frames: int) -> int:
    """Tokens of ``frames`` of mel: three convolutions of stride 2 within each second, a rest
    too."""
    rest = frames % 100
    for _ in range(3):
        rest = (rest + 1) // 2
    return rest + frames // 100 * TOKENS_A_SECOND


def _changed(budget: Budget | None, low: int, high: int) -> Budget | None:
    """``budget`` with another ``low`` or ``high``, in pixels, where these are not 0; the one that
    is given counts."""
    if not (low or high):
        return budget
    usual = budget or Budget(0, MOST_PIXELS)
    return Budget(low or min(usual.low, high), high or max(usual.high, low))


def _vision(model: Mapping[str, Any], pictures: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the tower, the image processor's own before the model's."""
    tower = model["vision_config"]
    patch, merge = tower.get("patch_size", 16), tower.get("spatial_merge_size", 2)
    return {
        "patch": patch,
        "merge": merge,
        "factor": patch * merge,
        "temporal": tower.get("temporal_patch_size", 2),
        "mean": tuple(pictures.get("image_mean", EVEN)),
        "std": tuple(pictures.get("image_std", EVEN)),
    }


def _budget(processor: Mapping[str, Any], usual: Budget) -> Budget:
    size = processor.get("size") or {}
    low = processor.get("min_pixels") or size.get("shortest_edge") or usual.low
    return Budget(low, processor.get("max_pixels") or size.get("longest_edge") or usual.high)


def _sampling(videos: Mapping[str, Any]) -> dict[str, Any]:
    usual = {"fps": 2.0, "min_frames": 4, "max_frames": 768}
    return {name: videos.get(name) or value for name, value in usual.items()}


def _qwen3_vl(
    model: Mapping[str, Any], pictures: Mapping[str, Any], videos: Mapping[str, Any]
) -> Rules:
    return Rules(
        **_vision(model, pictures),
        **_sampling(videos),
        image=_budget(pictures, IMAGE),
        clip=_budget(videos, CLIP),
    )


def _qwen3_omni(
    model: Mapping[str, Any], pictures: Mapping[str, Any], videos: Mapping[str, Any]
) -> Rules:
    return Rules(
        **_vision(model, pictures),
        **_sampling(videos),
        image=_budget(pictures, Budget(3136, 12845056)),
        # Its processor has these two as its own defaults, whatever the file of the model says.
        frame=Budget(128 * 32 * 32, 768 * 32 * 32),
        clip=None,
        frame_factor=2,
        stamped=False,
        positions_a_second=float(model.get("position_id_per_seconds", TOKENS_A_SECOND)),
        rate=pictures.get("sampling_rate", 16000),
        mel_bins=model["audio_config"].get("num_mel_bins", 128),
        window=pictures.get("n_fft", 400),
        hop=pictures.get("hop_length", 160),
    )


FAMILIES = {
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl,
    "qwen3_omni_moe": _qwen3_omni,
    "qwen3_omni_moe_thinker": _qwen3_omni,
}
"""Rules by `model_type` of a config.json."""
TAKEN = {
    name: (Kind.IMAGE, Kind.VIDEO, Kind.AUDIO) if made is _qwen3_omni else (Kind.IMAGE, Kind.VIDEO)
    for name, made in FAMILIES.items()
}
"""Kinds of media that each takes."""
