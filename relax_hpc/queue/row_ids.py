"""Ids of rows: the ticket of the prompt group, the number of the episode, and the row in it.

The owner of a ticket declares its prompt group complete by the rows that it puts: a number of
episodes, each of one row or several. Messages and the journal contain this as bytes, the number of
rows of each episode.
"""

from __future__ import annotations

from functools import lru_cache

MAX_ROWS = 100
"""Most rows of an episode: two digits number them."""
MAX_EPISODES = 1 << 16
"""Most episodes of a prompt group: a message about it has a byte for each."""


def row_id(ticket: int, episode: int, row: int = 0) -> str:
    """Id of a row of an episode of a prompt group.

    >>> row_id(123, 4), row_id(123, 4, 1)
    ('000000123.04.00', '000000123.04.01')
    """
    return f"{ticket:09d}.{episode:02d}.{row:02d}"


def parse_row_id(name: str) -> tuple[int, int, int]:
    """The ticket, the episode and the row of an id. ValueError: the id is malformed.

    >>> parse_row_id("000000123.04.01")
    (123, 4, 1)
    """
    try:
        ticket, _, end = name.partition(".")
        return _parse_natural(ticket), *_parse_suffix(end)
    except (ValueError, AttributeError):
        raise ValueError(
            f"row_id: found {name!r:.80}, expected ticket.episode.row, as {row_id(123, 4, 1)}"
        ) from None


@lru_cache(maxsize=4096)
def _parse_suffix(end: str) -> tuple[int, int]:
    """Episode and row of the end of an id, after the ticket. Prompt groups share few such ends."""
    episode, row = map(_parse_natural, end.split("."))
    return episode, row


def _parse_natural(digits: str) -> int:
    number = int(digits)
    if number < 0:
        raise ValueError(digits)
    return number


def ticket_of(name: str) -> int:
    """The ticket in the id of a row, or of a prompt group.

    >>> ticket_of("000000123.04.01"), ticket_of("000000123")
    (123, 123)
    """
    return int(name.partition(".")[0])


def row_ids(ticket: int, episodes: bytes) -> list[str]:
    """Ids of all rows of a prompt group; ``episodes``: rows of each episode.

    >>> row_ids(7, bytes([1, 2]))
    ['000000007.00.00', '000000007.01.00', '000000007.01.01']
    """
    start = f"{ticket:09d}"
    return [start + end for end in row_id_suffixes(episodes)]


@lru_cache(maxsize=1024)
def row_id_suffixes(episodes: bytes) -> tuple[str, ...]:
    """Ends of the ids of all rows, after the ticket."""
    ends = []
    for episode, rows in enumerate(episodes):
        ends += [f".{episode:02d}.{row:02d}" for row in range(rows)]
    return tuple(ends)


@lru_cache(maxsize=1024)
def rows_by_episode(keys: tuple[tuple[int, int], ...]) -> bytes:
    """Rows of each episode, given the (episode, row) of all rows. An episode with a gap has 0.

    ValueError: an episode has more than MAX_ROWS, or there are more than MAX_EPISODES.

    >>> [*rows_by_episode(((0, 0), (1, 1), (1, 0)))], [*rows_by_episode(((0, 0), (2, 1)))]
    ([1, 2], [1, 0, 0])
    """
    present: dict[int, set[int]] = {}
    for episode, row in keys:
        present.setdefault(episode, set()).add(row)
    largest, last = max(map(len, present.values())), max(present)
    if largest > MAX_ROWS:
        raise ValueError(f"row_id: found an episode of {largest} rows, allowed: at most {MAX_ROWS}")
    if last >= MAX_EPISODES:
        raise ValueError(f"row_id: found episode {last}, allowed: below {MAX_EPISODES}")
    complete = {
        episode: len(rows) if max(rows) < len(rows) else 0 for episode, rows in present.items()
    }
    return bytes(complete.get(episode, 0) for episode in range(last + 1))
