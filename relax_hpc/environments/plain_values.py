"""Conversion of values from other programs to plain JSON values: valid Unicode texts, and Python
numbers."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def clean_text(text: str) -> str:
    """``text`` with U+FFFD in place of each half of a surrogate pair, as in JavaScript's encoder.

    Programs in JavaScript may cut a text in the middle of an emoji, and the JSON of a model may
    contain `\\ud83d`. Tokenizers and UTF-8 cannot represent such a half.

    >>> clean_text("a\\ud83d"), clean_text("\\ud83d\\ude00")
    ('a\ufffd', '😀')
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def clean_texts(value: Any) -> Any:
    """A JSON value with `clean_text` applied to all texts. RecursionError: it is nested too
    deeply."""
    if isinstance(value, str):
        return clean_text(value)
    if isinstance(value, list):
        return [clean_texts(item) for item in value]
    if isinstance(value, dict):
        return {clean_text(key): clean_texts(item) for key, item in value.items()}
    return value


def read_plain(text: str | bytes) -> Any:
    """The value of a JSON text. NaN and the infinities, which are not valid JSON, become the texts
    "NaN", "Infinity" and "-Infinity".

    ValueError: it is not JSON, or is nested too deeply.

    >>> read_plain('{"reward": 0.5, "loss": NaN, "most": 1e999}')
    {'reward': 0.5, 'loss': 'NaN', 'most': 'Infinity'}
    """
    try:
        return clean_texts(json.loads(text, parse_constant=str, parse_float=_read_float))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def plain_number(value: Any) -> Any:
    """A scalar of numpy, torch or JAX as a Python number; any other value unchanged.

    >>> import numpy as np
    >>> plain_number(np.float32(0.5)), plain_number(np.bool_(True)), plain_number("a")
    (0.5, True, 'a')
    """
    is_scalar = hasattr(value, "dtype") and getattr(value, "shape", None) == ()
    return value.item() if is_scalar else value


def plain_values(value: Any) -> Any:
    """``value`` with numpy arrays and scalars converted to Python lists and numbers, and with
    `clean_text` applied to all texts.

    RecursionError: it is nested too deeply.

    >>> import numpy as np
    >>> plain_values({np.int64(1): (np.float32(0.5), np.arange(2))})
    {1: [0.5, [0, 1]]}
    """
    if isinstance(value, str):
        return clean_text(str(value))
    if isinstance(value, Mapping):
        return {plain_values(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_values(item) for item in value]
    if hasattr(value, "dtype") and hasattr(value, "tolist"):
        return plain_values(value.tolist())
    return value


def finite_number(value: Any) -> float | None:
    """``value`` as a float; None: it is not a finite number.

    >>> finite_number(1), finite_number(10**400), finite_number(True), finite_number("1")
    (1.0, None, None, None)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _read_float(text: str) -> float | str:
    number = float(text)
    if math.isfinite(number):
        return number
    return "Infinity" if number > 0 else "-Infinity"
