"""Names of rows: the prompt group's ticket, the number of the episode, and that of the row in it.

Who owns a ticket declares its prompt group complete by what it puts: so many episodes, each of one
row or several. That is told, and kept, as bytes: how many rows each episode has.
"""

from __future__ import annotations

from functools import lru_cache

MAX_ROWS = 100
"""Rows of an episode at most: they are numbered by two digits."""
MAX_EPISODES = 1 << 16
"""Episodes of a prompt group at most; a message about it has a byte for each."""


def row_id(ticket: int, episode: int, row: int = 0) -> str:
    """Id of a row of an episode of a prompt group.

    >>> row_id(123, 4), row_id(123, 4, 1)
    ('000000123.04.00', '000000123.04.01')
    """
    return f"{ticket:09d}.{episode:02d}.{row:02d}"


def place_of(name: str) -> tuple[int, int, int]:
    """The ticket, the episode and the row that an id names. ValueError: it is none.

    >>> place_of("000000123.04.01")
    (123, 4, 1)
    """
    try:
        ticket, _, end = name.partition(".")
        return _natural(ticket), *_place_in_prompt(end)
    except (ValueError, AttributeError):
        raise ValueError(
            f"row_id: found {name!r:.80}, expected ticket.episode.row, as {row_id(123, 4, 1)}"
        ) from None


@lru_cache(maxsize=4096)
def _place_in_prompt(end: str) -> tuple[int, int]:
    """Episode and row in the end of an id, behind the ticket: the same few in every prompt
    group."""
    episode, row = map(_natural, end.split("."))
    return episode, row


def _natural(digits: str) -> int:
    if (number := int(digits)) < 0:
        raise ValueError(digits)
    return number


def ticket_of(name: str) -> int:
    """The ticket in the id of a row, or of a prompt group.

    >>> ticket_of("000000123.04.01"), ticket_of("000000123")
    (123, 123)
    """
    return int(name.partition(".")[0])


def ids_of(ticket: int, episodes: bytes) -> list[str]:
    """Ids of all rows of a prompt group whose ``episodes`` have so many rows each.

    >>> ids_of(7, bytes([1, 2]))
    ['000000007.00.00', '000000007.01.00', '000000007.01.01']
    """
    start = f"{ticket:09d}"
    return [start + end for end in id_ends(episodes)]


@lru_cache(maxsize=1024)
def id_ends(episodes: bytes) -> tuple[str, ...]:
    """Ends of the ids of all rows, behind the ticket."""
    return tuple(
        f".{episode:02d}.{row:02d}" for episode, rows in enumerate(episodes) for row in range(rows)
    )


@lru_cache(maxsize=1024)
def rows_by_episode(places: tuple[tuple[int, int], ...]) -> bytes:
    """Rows of each episode, of which these (episode, row) are there; 0: not all of it is.

    ValueError: one has more than MAX_ROWS, or there are more than MAX_EPISODES.

    >>> [*rows_by_episode(((0, 0), (1, 1), (1, 0)))], [*rows_by_episode(((0, 0), (2, 1)))]
    ([1, 2], [1, 0, 0])
    """
    there: dict[int, set[int]] = {}
    for episode, row in places:
        there.setdefault(episode, set()).add(row)
    if (most := max(map(len, there.values()))) > MAX_ROWS:
        raise ValueError(f"row_id: found an episode of {most} rows, allowed: at most {MAX_ROWS}")
    if (last := max(there)) >= MAX_EPISODES:
        raise ValueError(f"row_id: found episode {last}, allowed: below {MAX_EPISODES}")
    whole = {episode: len(rows) if max(rows) < len(rows) else 0 for episode, rows in there.items()}
    return bytes(whole.get(episode, 0) for episode in range(last + 1))
