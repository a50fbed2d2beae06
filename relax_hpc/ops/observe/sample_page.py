"""A self-contained HTML page of samples, which stays safe whatever a model has written.

The data is JSON in an element that browsers do not execute. The page's script inserts it as text,
never as markup. The content security policy allows only this script, by its hash, and pictures
inside of the page; nothing is loaded.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

_UNSAFE = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Characters that could end the element of the data, with their JSON escapes."""


def render_page(head: dict[str, Any], samples: Sequence[dict[str, Any]]) -> str:
    """The page of ``samples``; ``head``: {run, left_out}, texts at its top."""
    style = read_asset("sample_page.css") + read_asset("sample_cards.css")
    script = read_asset("sample_cards.js") + read_asset("sample_page.js")
    text = read_asset("sample_page.html")
    data = {"about": head, "samples": [_without_recording(sample) for sample in samples]}
    sections = {
        "style": style,
        "script": script,
        "style_hash": policy_hash(style),
        "script_hash": policy_hash(script),
        # The data comes last, so that placeholders in it are not replaced.
        "data": embedded(data),
    }
    for name, section in sections.items():
        text = text.replace(f"{{{{{name}}}}}", section, 1)
    return text


def read_asset(name: str) -> str:
    """Text of a file beside this module. `sample_cards` are for every page that shows samples."""
    return (files(__package__) / name).read_text("utf-8")


def _without_recording(sample: dict[str, Any]) -> dict[str, Any]:
    """``sample`` without its recording, which the page does not show."""
    return {name: value for name, value in sample.items() if name != "recording"}


def embedded(value: Any) -> str:
    """JSON for a script element of an HTML page.

    >>> embedded("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    for character, spelled in _UNSAFE.items():
        text = text.replace(character, spelled)
    return text


def policy_hash(text: str) -> str:
    """Hash of an inline element, as a content security policy names it."""
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
