"""A corpus of documents in one file, an FTS5 index of SQLite. Many processes can read it; none
changes it.

`python -m relax_hpc.environments.tools.corpus FROM.jsonl TO.sqlite` makes a corpus from rows
{"title", "text"}.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.data.rows import read_rows

_CREATE = "CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')"
_SEARCH = (
    "SELECT title, text, snippet(documents, 1, '', '', ' ... ', 64) FROM documents WHERE "
    "documents MATCH ? ORDER BY bm25(documents, 4.0, 1.0), rowid LIMIT ?"
)
"""Query for the best documents. A word in a title has four times the weight of a word in a text."""
_MAX_WORDS = 32
_STEPS = 10_000
"""Number of SQLite's virtual machine instructions between two checks of the time limit."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Document:
    """A document of a search result."""

    title: str
    text: str
    excerpt: str
    """Up to 64 successive words of the text with the most words of the query."""


class Corpus:
    """An existing corpus. Threads may share it."""

    def __init__(self, path: Path | str) -> None:
        """ConfigError: the file is not a corpus."""
        # `immutable`: SQLite uses no locks, which some shared filesystems do not support.
        self._uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
        try:
            self.search("corpus", 1)
        except sqlite3.Error as error:
            command = "python -m relax_hpc.environments.tools.corpus FROM.jsonl TO.sqlite"
            raise ConfigError(
                f"corpus: {path}: found no corpus: {error}; make one by {command}"
            ) from error

    def search(self, query: str, count: int, limit_s: float = 10.0) -> list[Document]:
        """Up to ``count`` documents with the most words of ``query``, the best one first.
        TimeoutError: the search took longer than ``limit_s``. sqlite3.Error: the file cannot be
        read."""
        terms = list(dict.fromkeys(_WORD.findall(query)))[:_MAX_WORDS]
        if not terms:
            return []
        expression = " OR ".join(f'"{term}"' for term in terms)
        with closing(sqlite3.connect(self._uri, uri=True)) as database:
            with _limit_time(database, limit_s):
                rows = database.execute(_SEARCH, (expression, count))
                return [Document(*row) for row in rows]

    found = search  # Name in release 0.1.


def write_corpus(path: Path, documents: Iterable[tuple[str, str]]) -> int:
    """Write a corpus of titles and texts to ``path``, completely or not at all. Returns the number
    of documents."""
    partial = path.with_name(f".{path.name}.new")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as database, database:
        database.execute(_CREATE)
        database.executemany("INSERT INTO documents VALUES (?, ?)", documents)
        database.execute("INSERT INTO documents(documents) VALUES ('optimize')")
        (count,) = database.execute("SELECT count(*) FROM documents").fetchone()
    partial.rename(path)
    return count


@contextlib.contextmanager
def _limit_time(database: sqlite3.Connection, limit_s: float) -> Iterator[None]:
    """TimeoutError: a statement in the context takes longer than ``limit_s``."""
    until = time.monotonic() + limit_s
    database.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        yield
    except sqlite3.OperationalError as error:
        if time.monotonic() > until:
            raise TimeoutError from error
        raise


def _documents(path: str) -> Iterator[tuple[str, str]]:
    for row in read_rows(path):
        if not isinstance(row, tuple):
            message = log_entry(f"{path}:{row.line}: left out: {row.reason}: {row.detail}")
            print(message, file=sys.stderr)
            continue
        number, record = row
        text = record.get("text")
        if isinstance(text, str):
            yield str(record.get("title", "")), text
        else:
            print(f"{path}:{number}: left out: it has no text", file=sys.stderr)


def main() -> None:
    """Make a corpus from a file of rows."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m relax_hpc.environments.tools.corpus FROM.jsonl TO.sqlite")
    count = write_corpus(Path(sys.argv[2]), _documents(sys.argv[1]))
    print(f"{sys.argv[2]}: {count} documents")


if __name__ == "__main__":
    main()
