"""Search in a corpus of one's own, see `corpus`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Parameter, Tool
from relax_hpc.environments.tools.corpus import Corpus, Document

_KEY = "environment.options.tools.search"


class Search(Tool):
    """Finds documents by the words that they have."""

    name = "search"
    description = "Searches a collection of texts, and shows those that have most of the words."
    parameters: ClassVar = {"query": Parameter("string", "words that the texts should have")}

    def __init__(self, corpus: str, results: int = 3, characters: int = 600) -> None:
        """``results``: documents shown for a query. ``characters``: of a text shown whole; of a
        longer one an excerpt is. ConfigError: ``corpus`` is none."""
        if not Path(corpus).is_absolute():
            raise ConfigError(
                f"{_KEY}.corpus: found {corpus!r}, allowed: an absolute path, the same wherever a "
                "run goes on"
            )
        self._corpus, self._results, self._characters = Corpus(corpus), results, characters

    def call(self, query: str) -> str:
        """The documents, by title. ToolError: the query has no words, or too many documents have
        them."""
        try:
            found = self._corpus.found(query, self._results)
        except TimeoutError:
            raise ToolError("too many texts have these words; look for rarer ones") from None
        return "\n\n".join(map(self._shown, found)) or "No text has any of these words."

    def _shown(self, document: Document) -> str:
        text = (
            document.text
            if len(document.text) <= self._characters
            else document.excerpt[: self._characters]
        )
        return f"{document.title}\n{text}".strip()
