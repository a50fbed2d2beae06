"""Images of files: upright, on white, with 8 bits a channel, resized for the model."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from relax_hpc.data.multimodal.bad_media import Reason, UnusableMedium
from relax_hpc.data.multimodal.limits import Limits
from relax_hpc.data.multimodal.medium import Header, Kind, Medium
from relax_hpc.data.multimodal.rules import Rules
from relax_hpc.data.multimodal.sizes import Size
from relax_hpc.data.multimodal.source import Source, open_source, path_of, unreadable

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = (
    *("AVIF", "BMP", "GIF", "ICO", "JPEG", "JPEG2000", "PCX", "PNG"),
    *("PPM", "QOI", "SGI", "TIFF", "WEBP"),
)
"""Pillow's names of the formats that are read. EPS is excluded because Pillow starts Ghostscript
for it. TGA is excluded because it has no magic bytes, so that any content may be taken for it."""
_ORIENTATION = 0x0112
"""EXIF tag: orientation of the camera."""
_TURNS = {
    2: "FLIP_LEFT_RIGHT",
    3: "ROTATE_180",
    4: "FLIP_TOP_BOTTOM",
    5: "TRANSPOSE",
    6: "ROTATE_270",
    7: "TRANSVERSE",
    8: "ROTATE_90",
}
"""Value of that tag -> operation that turns the picture upright."""
_SWAPS_SIDES = range(5, 9)
"""Values of that tag whose operation swaps height and width."""
_SAMPLE_FORMAT, _SIGNED = 339, 2
"""TIFF tag: type of the samples; its value for signed integers."""
_SCALE_TOLERANCE = 1e-3
"""Share of the full scale by which floating-point pixels may exceed it, as after resampling and
rounding."""


def header(source: Source, rules: Rules, limits: Limits | None = None) -> Header:
    """Header of an image, from the header of its file. UnusableMedium: it is not an image, or
    exceeds a limit."""
    with _open_image(source, limits or Limits()) as image:
        return rules.image_header(_upright_size(image))


def load(source: Source, rules: Rules, limits: Limits | None = None) -> Medium:
    """An image in its stored form. UnusableMedium: it is not an image, is damaged, exceeds a limit,
    or has pixels of an unknown scale."""
    image = picture(source, limits)
    image = resize(image, rules.image_size((image.height, image.width)))
    return Medium(Kind.IMAGE, np.asarray(image), rules.image_header(image.size[::-1]).grid)


def picture(source: Source, limits: Limits | None = None) -> Image:
    """An image upright and in RGB, not resized. UnusableMedium: see `load`."""
    from PIL import Image as pillow

    with _open_image(source, limits or Limits()) as image:
        turn = _TURNS.get(_orientation(image))
        rgb_image = rgb(image)
        return rgb_image.transpose(pillow.Transpose[turn]) if turn else rgb_image


def rgb(image: Image) -> Image:
    """``image`` in RGB: 8 bits a channel (see `_eight_bits`), transparent pixels on white.

    UnusableMedium: its pixels have an unknown scale.
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
    from PIL import Image as pillow

    height, width = size
    if image.size == (width, height):
        return image
    return image.resize((width, height), pillow.Resampling.BICUBIC)


def _eight_bits(image: Image) -> Image:
    """``image`` with 8 bits a channel.

    Unsigned pixels of 16 bits are divided by 257. Floating-point pixels of 0 to 1 are multiplied by
    255. Whole numbers of 0 to 255 in wider types are kept. UnusableMedium: other values, for which
    the format defines no scale."""
    from PIL import Image as pillow

    # Only an image of TIFF has `tag_v2`.
    tiff_tags: Any = getattr(image, "tag_v2", {}) if image.format == "TIFF" else {}
    if _SIGNED in tiff_tags.get(_SAMPLE_FORMAT, ()) and image.mode != "I":
        raise UnusableMedium(
            Reason.UNSUPPORTED, f"a TIFF of signed samples as {image.mode}, allowed: unsigned ones"
        )
    # Pillow scales a PPM of more than 8 bits to 16 bits, and returns it in mode I.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        values = np.asarray(image).clip(0, 65535) // 257
    elif image.mode in ("I", "F"):
        values = _scale_wide(np.asarray(image), image.mode)
    else:
        return image
    return pillow.fromarray(values.astype(np.uint8))


def _scale_wide(values: np.ndarray, mode: str) -> np.ndarray:
    """Values of 0 to 255 for pixels of 32 bits."""
    if not np.isfinite(values).all():
        raise UnusableMedium(Reason.NOT_FINITE, f"{np.count_nonzero(~np.isfinite(values))} pixels")
    low, high = float(values.min()), float(values.max())
    if mode == "F" and low >= -_SCALE_TOLERANCE and high <= 1 + _SCALE_TOLERANCE:
        return np.rint(values.clip(0, 1) * 255)
    if low >= 0 and high <= 255 and np.array_equal(values, np.rint(values)):
        return values
    allowed = "whole numbers of 0 to 255" + (", or floating point of 0 to 1" if mode == "F" else "")
    kind = "32-bit floating-point" if mode == "F" else "32-bit integer"
    raise UnusableMedium(
        Reason.UNSUPPORTED, f"{kind} pixels from {low:g} to {high:g}, allowed: {allowed}"
    )


@contextmanager
def _open_image(source: Source, limits: Limits) -> Iterator[Image]:
    from PIL import Image as pillow

    with open_source(source, Kind.IMAGE, limits) as file, warnings.catch_warnings():
        # Pillow warns of many pixels, which are checked here, and of damaged tags, which are not
        # used.
        warnings.simplefilter("ignore")
        try:
            with pillow.open(file, formats=FORMATS) as image:
                if image.width * image.height > limits.pixels:
                    raise UnusableMedium(
                        Reason.PIXELS,
                        f"{image.width} x {image.height}, allowed {limits.pixels} together",
                    )
                yield image
        except pillow.DecompressionBombError as error:
            raise UnusableMedium(Reason.PIXELS, str(error)) from error
        except pillow.UnidentifiedImageError as error:
            raise _unidentified(file) from error
        except (OSError, SyntaxError, ValueError, EOFError, IndexError) as error:
            reason = Reason.TRUNCATED if "truncated" in str(error).lower() else Reason.CORRUPTED
            raise UnusableMedium(reason, str(error) or type(error).__name__) from error


def _unidentified(file: BinaryIO) -> UnusableMedium:
    """Error for a file that Pillow cannot open."""
    file.seek(0)
    if file.read(4) in (b"II*\0", b"MM\0*"):
        detail = "a kind of TIFF that Pillow does not read, such as floats of 16 or 64 bits"
        return UnusableMedium(Reason.UNSUPPORTED, detail)
    with path_of(file) as path:
        return unreadable(path, "its header cannot be read", ", ".join(FORMATS))


def _orientation(image: Image) -> int:
    # Pillow 13.0.0 turns a TIFF upright when it loads the pixels.
    if image.format == "TIFF":
        return 1
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:
        # Cameras write damaged EXIF data, for which Pillow raises many types of errors. The image
        # itself can be read.
        return 1


def _upright_size(image: Image) -> Size:
    if image.format == "TIFF":
        # Before the pixels are loaded, the size does not include an orientation in XMP.
        image.load()
    if _orientation(image) in _SWAPS_SIDES:
        return image.width, image.height
    return image.height, image.width
