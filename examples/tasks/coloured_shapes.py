"""A verifiable task for small models that see: colour or form of the shape in an image ("<image>c?"
-> "r")."""

from __future__ import annotations

import io
import random

from relax_hpc.examples.tasks.one_medium import OneMedium

COLOURS = {
    "r": (255, 0, 0),
    "g": (0, 255, 0),
    "b": (0, 0, 255),
    "y": (255, 255, 0),
    "p": (255, 0, 255),
    "w": (255, 255, 255),
}
FORMS = ("square", "circle", "triangle")
SIDE = 64
"""Pixels of an image, either way."""
_GROUND = (128, 128, 128)
"""Nothing, to a tower whose inputs are centred: a shape stands out from the first step on."""
_SMALLEST, _LARGEST = 20, 40
QUESTIONS = {"c?": list(COLOURS), "f?": [form[0] for form in FORMS]}
"""Question -> its answers: letters of colours, first letters of forms. Images have each equally
often."""


def drawn(name: str) -> tuple[bytes, str, str]:
    """The image called ``name``, a PNG of `SIDE` pixels a side, a question, and its answer: the
    same on every machine."""
    from PIL import Image, ImageDraw

    rng = random.Random(name)
    said = {question: rng.choice(letters) for question, letters in QUESTIONS.items()}
    colour, form = said.values()
    size = rng.randrange(_SMALLEST, _LARGEST)
    left, top = (rng.randrange(SIDE - size) for _ in range(2))
    image = Image.new("RGB", (SIDE, SIDE), _GROUND)
    pen, box = ImageDraw.Draw(image), (left, top, left + size, top + size)
    if form == "t":
        pen.polygon(
            [(left, top + size), (left + size, top + size), (left + size // 2, top)],
            fill=COLOURS[colour],
        )
    else:
        (pen.rectangle if form == "s" else pen.ellipse)(box, fill=COLOURS[colour])
    file = io.BytesIO()
    image.save(file, "PNG")
    question = rng.choice(list(QUESTIONS))
    return file.getvalue(), question, said[question]


class ColouredShapes(OneMedium):
    """Images of one shape, of 6 colours and 3 forms, anywhere and of any size."""

    kind, type, tokens = "image", "image/png", "<|vision_start|><|image_pad|><|vision_end|>"
    questions = QUESTIONS

    @classmethod
    def made(cls, name: str) -> tuple[bytes, str, str]:
        return drawn(name)
