"""A corpus of documents in one file, an index of SQLite's FTS5, which many processes read and none
changes.

`python -m relax_hpc.environments.tools.corpus FROM.jsonl TO.sqlite` makes one of rows {"title",
"text"}.
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

_MADE = "CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')"
_FOUND = (
    "SELECT title, text, snippet(documents, 1, '', '', ' ... ', 64) FROM documents WHERE "
    "documents MATCH ? ORDER BY bm25(documents, 4.0, 1.0), rowid LIMIT ?"
)
"""A word in a title counts as much as four in a text."""
_MOST_WORDS = 32
_STEPS = 10_000
"""Instructions of SQLite's machine between two looks at the clock."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True, slots=True)
class Document:
    """A document that was found."""

    title: str
    text: str
    excerpt: str
    """Part of the text, up to 64 words of it, in which most of what was looked for stands."""


class Corpus:
    """A corpus that was made before; threads may share it."""

    def __init__(self, path: Path | str) -> None:
        """ConfigError: it is none."""
        # Nobody writes: no lock is asked for, which some shared filesystems do not have.
        self._uri = f"file:{quote(str(path))}?mode=ro&immutable=1"
        try:
            list(self.found("corpus", 1))
        except sqlite3.Error as error:
            made = "python -m relax_hpc.environments.tools.corpus FROM.jsonl TO.sqlite"
            raise ConfigError(
                f"corpus: {path}: found no corpus: {error}; make one by {made}"
            ) from error

    def found(self, question: str, most: int, limit_s: float = 10.0) -> list[Document]:
        """The documents that have most of the words of ``question``, the best one first.
        TimeoutError: ``limit_s`` are over. sqlite3.Error: the file cannot be read."""
        words = list(dict.fromkeys(_WORD.findall(question)))[:_MOST_WORDS]
        if not words:
            return []
        with closing(sqlite3.connect(self._uri, uri=True)) as database:
            with _limited(database, limit_s):
                rows = database.execute(_FOUND, (" OR ".join(f'"{word}"' for word in words), most))
                return [Document(*row) for row in rows]


def write_corpus(path: Path, documents: Iterable[tuple[str, str]]) -> int:
    """Write a corpus of titles and texts, whole or not at all; how many there are."""
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    with closing(sqlite3.connect(beside)) as database, database:
        database.execute(_MADE)
        database.executemany("INSERT INTO documents VALUES (?, ?)", documents)
        database.execute("INSERT INTO documents(documents) VALUES ('optimize')")
        (count,) = database.execute("SELECT count(*) FROM documents").fetchone()
    beside.rename(path)
    return count


@contextlib.contextmanager
def _limited(database: sqlite3.Connection, limit_s: float) -> Iterator[None]:
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
            print(
                log_entry(f"{path}:{row.line}: left out: {row.reason}: {row.detail}"),
                file=sys.stderr,
            )
        elif isinstance(text := row[1].get("text"), str):
            yield str(row[1].get("title", "")), text
        else:
            print(f"{path}:{row[0]}: left out: it has no text", file=sys.stderr)


def main() -> None:
    """Make a corpus of a file of rows."""
    if len(sys.argv) != 3:
        sys.exit("usage: python -m relax_hpc.environments.tools.corpus FROM.jsonl TO.sqlite")
    count = write_corpus(Path(sys.argv[2]), _documents(sys.argv[1]))
    print(f"{sys.argv[2]}: {count} documents")


if __name__ == "__main__":
    main()
