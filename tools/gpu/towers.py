"""Vision towers: bfloat16 compared with float32, and seconds of images and videos."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from cases import Cases
from child import answer, timed
from passes import host_and_total_s, peak_gib, reset_peak

from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.training.models.towers.attention import choose_attention
from relax_hpc.training.models.towers.encoder_input import TowerMedia
from relax_hpc.training.models.towers.vision import VisionTower

if TYPE_CHECKING:
    from torch import Tensor

Grids = Sequence[Sequence[int]]
"""Sizes (time, height, width) of media in patches. A patch has two frames."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiny": {
        "depth": 2,
        "width": 64,
        "inner": 192,
        "heads": 4,
        "out": 128,
        "learned": 64,
        "deep": (0,),
    },
    "Qwen3-VL": {
        "depth": 27,
        "width": 1152,
        "inner": 4304,
        "heads": 16,
        "out": 4096,
        "learned": 2304,
        "deep": (8, 16, 24),
    },
}
_NUMBER = re.compile(r"\d+")


class PackedTower(VisionTower):
    """A tower that is used with `model.tower_attention: packed`."""

    def encode(self, module: torch.nn.Module, media: TowerMedia) -> Tensor:
        """See `Tower.encode`."""
        choose_attention(module, self.head_size)
        return super().encode(module, media)


def describe_tower(shape: str, packed: bool) -> VisionTower:
    """The description of a tower."""
    tower_class = PackedTower if packed else VisionTower
    return tower_class(
        prefix="",
        channels=3,
        patch=16,
        merge=2,
        temporal=2,
        activation="gelu_pytorch_tanh",
        **SHAPES[shape],
    )


def random_media(tower: VisionTower, grids: Grids, device: str) -> TowerMedia:
    """Random pixels of media with these ``grids``."""
    table = torch.tensor(grids)
    patches = int(table.prod(1).sum())
    generator = torch.Generator().manual_seed(0)
    values = tower.channels * tower.temporal * tower.patch**2
    pixels = torch.randint(0, 256, (patches, values), dtype=torch.uint8, generator=generator)
    unused = torch.empty(0, dtype=torch.int64, device=device)
    # The grids stay on the host.
    return TowerMedia(pixels.to(device), table, unused, unused, Rules())


def run_pass(tower: VisionTower, module: torch.nn.Module, media: TowerMedia) -> Tensor:
    """Results of a forward pass, [1 + levels, tokens, out], after a backward pass. Previous
    gradients are discarded."""
    module.zero_grad()
    encoded = tower.encode(module, media)
    encoded.float().square().mean().backward()
    return encoded.detach()


def convert(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Convert the parameters, but no buffers, as a model does with its towers."""
    module.zero_grad()
    for value in module.parameters():
        value.data = value.data.to(dtype)


def compare(
    tower: VisionTower,
    module: torch.nn.Module,
    grids: Grids,
    device: str,
    figures: dict[str, Any],
) -> None:
    """Add distances of results and gradients in bfloat16 from those in float32 to ``figures``.

    They are relative to the norm. ``module`` has bfloat16 parameters before and after.
    """
    media = random_media(tower, grids, device)
    convert(module, torch.float32)
    try:
        expected = run_pass(tower, module, media)
        gradients = _gradients(module)
    finally:
        convert(module, torch.bfloat16)
    result = run_pass(tower, module, media)
    errors, norms = defaultdict[str, float](float), defaultdict[str, float](float)
    for name, gradient in _gradients(module).items():
        # Parameters whose names differ only in numbers are one kind.
        kind, exact = _NUMBER.sub("*", name), gradients[name]
        errors[kind] += float((gradient.float() - exact).square().sum())
        norms[kind] += float(exact.square().sum())
    distances = {kind: (errors[kind] / max(norms[kind], 1e-60)) ** 0.5 for kind in errors}
    worst = max(distances, key=distances.__getitem__)
    figures |= {
        "error": float((result.float() - expected).norm() / expected.norm()),
        "gradient_error": (sum(errors.values()) / max(sum(norms.values()), 1e-60)) ** 0.5,
        "worst_gradient_error": distances[worst],
        "worst_gradient": worst,
        "patches": float(len(media.values)),
    }


def _gradients(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.grad for name, value in module.named_parameters() if value.grad is not None}


def time_media(
    tower: VisionTower,
    module: torch.nn.Module,
    grids: Grids,
    rounds: int,
    device: str,
    figures: dict[str, Any],
) -> None:
    """Add seconds of a forward and backward pass, and of the patch embedding alone, to
    ``figures``."""
    from step import kernel_seconds

    media = random_media(tower, grids, device)
    act = partial(run_pass, tower, module, media)
    reset_peak(device)
    first_s = timed(act, device)
    host_s, pass_s = host_and_total_s(act, rounds, device)
    figures |= {
        "pass_s": pass_s,
        "host_s": host_s,
        "first_pass_s": first_s,
        "memory_gib": peak_gib(device),
        "patches": float(len(media.values)),
    }
    module.zero_grad()
    embedding: Any = module.patch_embed
    pixels = media.values.float()
    with torch.no_grad():
        embed = partial(embedding, pixels)
        embed()
        figures["patch_embedding_s"] = host_and_total_s(embed, rounds, device)[1]
    figures["kernels_s"] = kernel_seconds(act, device)


def time_new_sizes(
    tower: VisionTower,
    module: torch.nn.Module,
    grids: Grids,
    device: str,
    figures: dict[str, Any],
) -> None:
    """Add seconds of the first and of the second pass of each image of ``grids``, one at a time, to
    ``figures``."""
    first, second = [], []
    for grid in grids:
        act = partial(run_pass, tower, module, random_media(tower, [grid], device))
        first.append(timed(act, device))
        second.append(timed(act, device))
    figures |= {
        "first_s": [round(value, 4) for value in first],
        "second_s": [round(value, 4) for value in second],
        "first_of_second": sum(first) / sum(second),
    }


def measure(
    device: str,
    shape: str,
    compared: Grids,
    images: Grids,
    short_video: Grids,
    long_video: Grids,
    new_sizes: Grids,
    packed: bool = False,
    rounds: int = 3,
) -> dict[str, Any]:
    """Most arguments have the sizes of media, see `Grids`.

    ``compared``: media whose results in bfloat16 are compared with float32. ``new_sizes``: sizes of
    images that no other argument has. ``packed``: attention as with `model.tower_attention:
    packed`.
    """
    # The first layer is a convolution, which torch computes with TF32 also in float32.
    torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    tower = describe_tower(shape, packed)
    module = tower.build().to(device)
    convert(module, torch.bfloat16)
    cases = Cases(device)
    cases.run("compared", partial(compare, tower, module, compared, device))
    cases.run("images", partial(time_media, tower, module, images, rounds, device))
    cases.run("short video", partial(time_media, tower, module, short_video, rounds, device))
    cases.run("new sizes", partial(time_new_sizes, tower, module, new_sizes, device))
    cases.run("long video", partial(time_media, tower, module, long_video, rounds, device))
    return cases.figures


if __name__ == "__main__":
    answer(measure)
