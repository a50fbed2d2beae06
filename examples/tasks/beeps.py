"""A verifiable task for small models that hear: the pitch or the number of beeps ("<audio>p?" ->
"m", "<audio>n?" -> "3")."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

from relax_hpc.examples.tasks.one_medium import OneMedium

if TYPE_CHECKING:
    import numpy as np

PITCHES = {"a": 220.0, "b": 520.0, "c": 1230.0, "d": 2900.0}
"""Answer -> hertz, within `_OFF` of which its beeps are."""
MOST = 4
"""Beeps of a sound, at most."""
RATE, SECONDS = 16000, 1.0
QUESTIONS = {"p?": list(PITCHES), "n?": [str(number) for number in range(1, MOST + 1)]}
"""Question -> its answers, of which sounds have each equally often."""
_OFF = 1.25
"""Factor by which a pitch may be higher or lower; the next one begins beyond it."""
_SLOT_S, _EDGE_S = SECONDS / MOST, 0.01
"""Seconds that a beep has for itself, silence included; seconds in which it begins, or ends."""


def sounded(name: str, questions: Sequence[str] = tuple(QUESTIONS)) -> tuple[bytes, str, str]:
    """The sound called ``name``, a FLAC file of a second, one of the ``questions``, and its answer:
    the same on every machine."""
    import numpy as np
    import soundfile

    rng = random.Random(name)
    said = {question: rng.choice(letters) for question, letters in QUESTIONS.items()}
    pitch, count = said.values()
    hertz = PITCHES[pitch] * _OFF ** rng.uniform(-1, 1)
    slots = set(rng.sample(range(MOST), int(count)))
    parts = [_slot(rng, hertz if slot in slots else 0.0) for slot in range(MOST)]
    file = io.BytesIO()
    soundfile.write(file, np.concatenate(parts), RATE, format="FLAC")
    question = rng.choice(questions)
    return file.getvalue(), question, said[question]


def _slot(rng: random.Random, hertz: float) -> np.ndarray:
    """Samples of a beep somewhere in its slot; of 0 ``hertz``, silence."""
    import numpy as np

    times = np.arange(int(_SLOT_S * RATE)) / RATE
    length = rng.uniform(0.5, 0.75) * _SLOT_S
    start, loud = rng.uniform(0.1 * _SLOT_S, 0.9 * _SLOT_S - length), rng.uniform(0.3, 0.9)
    edge = np.minimum(times - start, start + length - times).clip(0, _EDGE_S) / _EDGE_S
    return loud * edge * np.sin(2 * np.pi * hertz * times)


class Beeps(OneMedium):
    """Sounds of 1 to 4 beeps of one of 4 pitches, of any loudness."""

    kind, type, tokens = "audio", "audio/flac", "<|audio_start|><|audio_pad|><|audio_end|>"
    questions = QUESTIONS

    @classmethod
    def made(cls, name: str) -> tuple[bytes, str, str]:
        return sounded(name)


class Pitches(Beeps):
    """Such sounds, of which only the pitch is asked for: a number is much harder to hear."""

    questions: ClassVar[Mapping[str, Sequence[str]]] = {"p?": QUESTIONS["p?"]}

    @classmethod
    def made(cls, name: str) -> tuple[bytes, str, str]:
        return sounded(name, tuple(cls.questions))
