"""Hook of MkDocs: links from docs/ to files outside of it, such as `../README.md` or a source file.

On a code host these links work as they are. In the site they lead to the repository, if `repo_url`
in mkdocs.yml (or the variable RELAX_DOCS_REPO) names one; else the text stays without a link. A
target that does not exist is a warning, which ends a strict build.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(((?:\.\./)+[^)\s#]+)(#[^)\s]*)?\)")
_log = logging.getLogger("mkdocs.hooks.site_links")


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Rewrite each link that leaves docs/; called by MkDocs for each page."""
    docs = Path(config.docs_dir).resolve()
    root = Path(config.config_file_path).resolve().parent
    source = Path(page.file.abs_src_path).resolve()

    def rewritten(match: re.Match[str]) -> str:
        text, link, anchor = match[1], match[2], match[3] or ""
        target = (source.parent / link).resolve()
        if target.is_relative_to(docs):
            return match[0]
        if not target.exists() or not target.is_relative_to(root):
            _log.warning(
                "%s: link to %s: there is no such file in the repository", page.file.src_uri, link
            )
            return text
        if not config.repo_url:
            return text
        return (
            f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{target.relative_to(root)}{anchor})"
        )

    return _LINK.sub(rewritten, markdown)
