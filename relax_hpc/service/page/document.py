"""The HTML document of the page. Nothing in it is loaded from another host.

The content security policy allows the styles and scripts of this package, by their hashes, and
pictures inside of the page. The document of a live run has no data: its script asks the server.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from relax_hpc.ops.observe.sample_page import embedded, policy_hash, read_asset

MARK = '<meta name="generator" content="relax-hpc page">'
"""Element near the beginning of each page, by which a page is recognised."""
_LIBRARY = "uplot.min"
"""uPlot, a library for charts; `assets/vendored.json` has its licence, origin and digests."""


def render_document(data: dict[str, Any]) -> str:
    """The document with ``data``: {state, samples} of `take_snapshot`, or {live: true}."""
    style = _asset(f"{_LIBRARY}.css") + _asset("page.css") + read_asset("sample_cards.css")
    script = read_asset("sample_cards.js") + _asset("page.js")
    library = _asset(f"{_LIBRARY}.js")
    sections = {
        "policy": _policy([style], [library, script], is_live=bool(data.get("live"))),
        "style": style,
        "library": library,
        "script": script,
        # The data comes last, so that placeholders in it are not replaced.
        "data": embedded(data),
    }
    text = _asset("page.html")
    for name, section in sections.items():
        text = text.replace(f"{{{{{name}}}}}", section, 1)
    return text


def render_login(action: str, message: str = "") -> str:
    """The form for the token, which is sent to ``action``. ``message``: why it is shown again."""
    style = _asset("page.css")
    text = _asset("login.html")
    sections = {
        "policy": _policy([style], [], is_live=True),
        "style": style,
        "action": html.escape(action),
        "message": html.escape(message),
    }
    for name, section in sections.items():
        text = text.replace(f"{{{{{name}}}}}", section, 1)
    return text


def _policy(styles: Sequence[str], scripts: Sequence[str], is_live: bool) -> str:
    """Content security policy of a document with these styles and scripts."""
    own_server = "'self'" if is_live else "'none'"
    directives = {
        "default-src": "'none'",
        "base-uri": "'none'",
        "script-src": _hashes(scripts),
        "style-src": _hashes(styles),
        "img-src": "data:",
        "connect-src": own_server,
        "form-action": own_server,
    }
    return "; ".join(f"{name} {sources}" for name, sources in directives.items())


def _hashes(texts: Sequence[str]) -> str:
    return " ".join(f"'{policy_hash(text)}'" for text in texts) or "'none'"


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text("utf-8")
