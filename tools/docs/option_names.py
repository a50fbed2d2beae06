"""Table of names of settings in other trainers, for docs/coming-from.md."""

from __future__ import annotations

from relax_hpc.config.other_trainers import TABLE, TRAINERS, OtherName, names_of


def table(_: str) -> str:
    """Lines of the table: names here, in each trainer, and a note."""
    rows = [f"| here | {' | '.join(TRAINERS)} | note |", "|---" * (len(TRAINERS) + 2) + "|"]
    rows += [_row(setting) for setting in TABLE]
    return "\n".join(rows)


def _row(setting: OtherName) -> str:
    ours = f"`{setting.ours}`" if setting.ours else "-"
    cells = [", ".join(f"`{name}`" for name in names) for _, names in names_of(setting)]
    return f"| {ours} | {' | '.join(cells)} | {setting.note} |"
