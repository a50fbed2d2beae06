"""Search in a user's corpus, see `corpus`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

from relax_hpc.base.errors import ConfigError
from relax_hpc.environments.tool_calls import ToolError
from relax_hpc.environments.tools.base import Parameter, Tool
from relax_hpc.environments.tools.corpus import Corpus, Document

_KEY = "environment.options.tools.search"


class Search(Tool):
    """Finds documents by their words."""

    name = "search"
    description = "Searches a collection of texts, and shows those that have most of the words."
    parameters: ClassVar = {"query": Parameter("string", "words that the texts should have")}

    def __init__(self, corpus: str, results: int = 3, characters: int = 600) -> None:
        """``results``: maximum number of documents shown for a query. ``characters``: maximum
        length of a text that is shown completely; of a longer text an excerpt is shown.
        ConfigError: the file ``corpus`` is not a corpus."""
        if not Path(corpus).is_absolute():
            raise ConfigError(
                f"{_KEY}.corpus: found {corpus!r}, allowed: an absolute path, which is also valid "
                "where a run resumes"
            )
        self._corpus, self._results, self._characters = Corpus(corpus), results, characters

    def call(self, query: str) -> str:
        """Titles and texts of the documents. ToolError: the search takes too long, because too many
        documents have the words."""
        try:
            documents = self._corpus.search(query, self._results)
        except TimeoutError:
            raise ToolError("too many texts have these words; look for rarer ones") from None
        return "\n\n".join(map(self._show, documents)) or "No text has any of these words."

    def _show(self, document: Document) -> str:
        text = document.text
        if len(text) > self._characters:
            text = document.excerpt[: self._characters]
        return f"{document.title}\n{text}".strip()
