"""Images of files: upright, on white, 8 bits a channel, of the size that the model takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from relax_hpc.data.multimodal.bad_media import BadMedium, Reason
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sizes import Size
from relax_hpc.data.multimodal.source import Source, opened, path_of, unreadable

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = (
    *("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG"),
    *("PPM", "QOI", "SGI", "TIFF", "WEBP"),
)
"""Pillow's names of the formats that are read. Of the others, EPS starts Ghostscript, and TGA has
no bytes by which it is known, so that any content may pass for it."""
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
_SAMPLE_FORMAT, _SIGNED = 339, 2
"""TIFF tag: how samples are coded; its value for signed integers."""
_SLACK = 1e-3
"""Share of the full scale by which floating-point pixels may be beyond it: resampling and rounding
leave that much."""


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of an image, of its file's own header. BadMedium: it is none, or over a limit."""
    with _image(source, limits or Limits()) as image:
        return rules.image_header(_upright_size(image))


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """An image as it is stored. BadMedium: it is none, damaged, over a limit, or of pixels that
    have no rule."""
    image = picture(source, limits)
    image = resize(image, rules.image_size((image.height, image.width)))
    return Medium(Kind.IMAGE, np.asarray(image), rules.image_header(image.size[::-1]).grid)


def picture(source: Source, limits: Limits | None = None) -> Image:
    """An image upright and in RGB, not resized. BadMedium: as `load`."""
    with _image(source, limits or Limits()) as image:
        turn = _TURNS.get(_orientation(image))
        upright = rgb(image)
        return upright.transpose(_constant("Transpose", turn)) if turn else upright


def rgb(image: Image) -> Image:
    """``image`` in RGB: 8 bits a channel (see `_eight_bits`), transparent parts on white.

    BadMedium: its pixels have no rule.
    """
    from PIL import Image as pillow

    image = _eight_bits(image)
    if image.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in image.info:
        white = pillow.new("RGBA", image.size, "white")
        white.alpha_composite(image.convert("RGBA"))
        image = white
    return image.convert("RGB")


def resize(image: Image, size: Size) -> Image:
    """``image`` in ``size``, bicubic."""
    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), _constant("Resampling", "BICUBIC"))


def _eight_bits(image: Image) -> Image:
    """``image`` with 8 bits a channel.

    16 bits without a sign are divided by 257. Floating-point pixels of 0 to 1 are multiplied by
    255. Whole numbers of 0 to 255 in wider types are kept. BadMedium: others, which no
    format gives a scale.
    """
    from PIL import Image as pillow

    if (
        image.format == "TIFF"
        and _SIGNED in image.tag_v2.get(_SAMPLE_FORMAT, ())
        and image.mode != "I"
    ):
        raise BadMedium(
            Reason.UNSUPPORTED, f"a TIFF of signed samples as {image.mode}, allowed: unsigned ones"
        )
    # Pillow scales a PPM of more than 8 bits to 16.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        values = np.asarray(image).clip(0, 65535) // 257
    elif image.mode in ("I", "F"):
        values = _scaled(np.asarray(image), image.mode)
    else:
        return image
    return pillow.fromarray(values.astype(np.uint8))


def _scaled(values: np.ndarray, mode: str) -> np.ndarray:
    """Values of 0 to 255 for pixels of 32 bits."""
    if not np.isfinite(values).all():
        raise BadMedium(Reason.NOT_FINITE, f"{np.count_nonzero(~np.isfinite(values))} pixels")
    low, high = float(values.min()), float(values.max())
    if mode == "F" and low >= -_SLACK and high <= 1 + _SLACK:
        return np.rint(values.clip(0, 1) * 255)
    if low >= 0 and high <= 255 and np.array_equal(values, np.rint(values)):
        return values
    allowed = "whole numbers of 0 to 255" + (", or floating point of 0 to 1" if mode == "F" else "")
    kind = "32-bit floating-point" if mode == "F" else "32-bit integer"
    raise BadMedium(
        Reason.UNSUPPORTED, f"{kind} pixels from {low:g} to {high:g}, allowed: {allowed}"
    )


@contextmanager
def _image(source: Source, limits: Limits) -> Iterator[Image]:
    from PIL import Image as pillow

    with opened(source, Kind.IMAGE, limits) as file, warnings.catch_warnings():
        # Of many pixels, which are counted here, and of tags that nothing uses.
        warnings.simplefilter("ignore")
        try:
            with pillow.open(file, formats=FORMATS) as image:
                if image.width * image.height > limits.pixels:
                    raise BadMedium(
                        Reason.PIXELS,
                        f"{image.width} x {image.height}, allowed {limits.pixels} together",
                    )
                yield image
        except pillow.DecompressionBombError as error:
            raise BadMedium(Reason.PIXELS, str(error)) from error
        except pillow.UnidentifiedImageError as error:
            raise _unidentified(file) from error
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            reason = Reason.TRUNCATED if "truncated" in str(error).lower() else Reason.CORRUPTED
            raise BadMedium(reason, str(error) or type(error).__name__) from error


def _unidentified(file: BinaryIO) -> BadMedium:
    """Error for a file that Pillow does not open."""
    file.seek(0)
    if file.read(4) in (b"II*\0", b"MM\0*"):
        detail = "a kind of TIFF that Pillow does not read, such as floats of 16 or 64 bits"
        return BadMedium(Reason.UNSUPPORTED, detail)
    with path_of(file) as path:
        return unreadable(path, "its header cannot be read", ", ".join(FORMATS))


def _orientation(image: Image) -> int:
    # Pillow turns TIFFs itself when it loads them (13.0.0).
    if image.format == "TIFF":
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # what cameras write is of no consequence, and Pillow raises anything for it
        return 1


def _upright_size(image: Image) -> Size:
    if image.format == "TIFF":
        # An orientation in XMP is not in its size before it is loaded.
        image.load()
    if _orientation(image) in _ON_ITS_SIDE:
        return image.width, image.height
    return image.height, image.width


def _constant(enumeration: str, name: str) -> int:
    from PIL import Image as pillow

    return getattr(getattr(pillow, enumeration), name)
