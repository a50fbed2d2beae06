"""Media that rows name, read from a media store as a model's towers take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from relax_hpc.models.towers.media import RowMedia, TowerInput
from relax_hpc.multimodal.features import mel, patches
from relax_hpc.multimodal.medium import Kind, Medium
from relax_hpc.multimodal.positions import positions
from relax_hpc.multimodal.rules import Rules
from relax_hpc.transfer_queue.row_schema import Row


def read_media(
    rows: Sequence[Row], read: Callable[[str], memoryview], rules: Rules, embeds: bool = True
) -> RowMedia | None:
    """Media of ``rows``, each read once by its id; None: they name none. Errors are those of ``read``.

    ``embeds``: whether towers are to take them; else it is for positions alone.
    """
    names = dict.fromkeys(span["media_id"] for row in rows for span in row.get("spans") or ())
    return as_taken({name: Medium.from_bytes(read(name)) for name in names}, rules, embeds) if names else None


def as_taken(media: Mapping[str, Medium], rules: Rules, embeds: bool = True) -> RowMedia:
    """``media`` by their ids as towers take them."""
    headers = {name: medium.header for name, medium in media.items()}
    inputs = {name: tower_input(medium, rules) for name, medium in media.items()} if embeds else {}
    return RowMedia(inputs, lambda row: positions(len(row["token_ids"]), row["spans"], headers, rules))


def tower_input(medium: Medium, rules: Rules) -> TowerInput:
    """``medium`` as its tower takes it."""
    values = mel(medium, rules).T if medium.kind is Kind.AUDIO else patches(medium, rules)
    return TowerInput(str(medium.kind), values, medium.grid, rules.tokens(medium))
