"""Images of files: upright, on white, 8 bits a channel, of the size that the model takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from relax_hpc.multimodal.bad import BadMedium, Reason
from relax_hpc.multimodal.limits import Limits
from relax_hpc.multimodal.medium import Header, Kind, Medium
from relax_hpc.multimodal.rules import Rules
from relax_hpc.multimodal.sizes import Size
from relax_hpc.multimodal.source import Source, opened

if TYPE_CHECKING:
    from PIL.Image import Image

_ORIENTATION = 0x0112
"""EXIF tag: how the camera was held."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Value of that tag -> operation that stands the picture upright."""
_ON_ITS_SIDE = range(5, 9)


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of an image, of its file's own header. BadMedium: it is none, or over a limit."""
    with _image(source, limits or Limits()) as image:
        return rules.image_header(_upright_size(image))


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """An image as it is stored. BadMedium: it is none, damaged, or over a limit."""
    found = picture(source, limits)
    found = resize(found, rules.image_size((found.height, found.width)))
    return Medium(Kind.IMAGE, np.asarray(found), rules.image_header(found.size[::-1]).grid)


def picture(source: Source, limits: Limits | None = None) -> Image:
    """An image upright and in RGB, of its own size. BadMedium: it is none, damaged, or over a limit."""
    with _image(source, limits or Limits()) as image:
        turn = _TURNS.get(_orientation(image))
        found = rgb(image)
        return found.transpose(_constant("Transpose", turn)) if turn else found


def rgb(image: Image) -> Image:
    """``image`` in RGB: the high byte of 16 bits, transparent parts on white."""
    from PIL import Image as pillow

    if image.mode.startswith("I"):
        image = pillow.fromarray((np.asarray(image).clip(0, 65535) // 257).astype(np.uint8))
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        white = pillow.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


def resize(image: Image, size: Size) -> Image:
    """``image`` in ``size``, bicubic."""
    height, width = size
    return image if image.size == (width, height) else image.resize((width, height), _constant("Resampling", "BICUBIC"))


@contextmanager
def _image(source: Source, limits: Limits) -> Iterator[Image]:
    from PIL import Image as pillow

    with opened(source, Kind.IMAGE, limits) as file, warnings.catch_warnings():
        # Of many pixels, which are counted here, and of tags that nobody asks for.
        warnings.simplefilter("ignore")
        try:
            with pillow.open(file) as image:
                if image.width * image.height > limits.pixels:
                    raise BadMedium(Reason.PIXELS, f"{image.width} x {image.height}, allowed {limits.pixels} together")
                yield image
        except pillow.DecompressionBombError as error:
            raise BadMedium(Reason.PIXELS, str(error)) from error
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            reason = Reason.TRUNCATED if "truncated" in str(error).lower() else Reason.CORRUPTED
            raise BadMedium(reason, str(error) or type(error).__name__) from error


def _orientation(image: Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # what cameras write is of no consequence, and Pillow raises anything for it
        return 1


def _upright_size(image: Image) -> Size:
    return (image.width, image.height) if _orientation(image) in _ON_ITS_SIDE else (image.height, image.width)


def _constant(enumeration: str, name: str) -> int:
    from PIL import Image as pillow

    return getattr(getattr(pillow, enumeration), name)
