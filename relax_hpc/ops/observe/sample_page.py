"""One HTML page of samples that needs nothing else: filtered by plain JavaScript, safe whatever a
model has written.

The data is JSON in an element that no browser runs; scripts put it into the page as text, never as
markup; and the page's policy lets the browser run its own script, by its hash, show pictures that
the page holds, and load nothing at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that could end the element that the data is in, as JSON escapes them."""


def page(about: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """The page of ``samples``; ``about``: {run, left_out}, words for its head."""
    folder = files(__package__)
    style, script, frame = (
        (folder / f"sample_page.{kind}").read_text("utf-8") for kind in ("css", "js", "html")
    )
    parts = {
        "style": style,
        "script": script,
        "style_hash": _hash(style),
        "script_hash": _hash(script),
        "data": embedded({"about": about, "samples": [_shown(sample) for sample in samples]}),
    }
    # The data comes last: nothing is looked for in it.
    for name, text in parts.items():
        frame = frame.replace(f"{{{{{name}}}}}", text, 1)
    return frame


def _shown(sample: dict[str, Any]) -> dict[str, Any]:
    """``sample`` without what nobody looks at."""
    return {name: value for name, value in sample.items() if name != "recording"}


def embedded(value: Any) -> str:
    """JSON that an HTML page can hold within a script element.

    >>> embedded("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character, spelled in _UNSAFE.items():
        text = text.replace(character, spelled)
    return text


def _hash(text: str) -> str:
    """Hash by which a content security policy names an inline element."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
