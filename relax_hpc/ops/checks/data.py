"""Checks of the settings `data`: training sets, weights, columns and the date of templates."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from datetime import date

from relax_hpc.config.schema import DataConfig
from relax_hpc.data.columns import ROW_FIELDS
from relax_hpc.data.visits import CYCLE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


def check_data(data: DataConfig) -> Iterator[str]:
    """Check the training sets, their weights and columns, and the date of templates."""
    yield from _train_sets(data)
    yield from _weights(data)
    for field in data.columns.keys() - set(ROW_FIELDS):
        yield f"data.columns: found {field!r}, allowed: {', '.join(ROW_FIELDS)}"
    for field, column in data.columns.items():
        if not column:
            yield f"data.columns.{field}: found an empty text, allowed: the name of a column"
    if data.template_date and not _is_date(data.template_date):
        yield (
            f"data.template_date: found {data.template_date!r}, allowed: a date as YYYY-MM-DD, "
            "or empty"
        )
    if data.order_by and not (data.train or data.train_sets or data.task):
        yield f"data.order_by: found {data.order_by!r} without training rows; remove it"


def _train_sets(data: DataConfig) -> Iterator[str]:
    if data.train and data.train_sets:
        names = ", ".join(data.train_sets)
        yield (
            f"data.train_sets: found {names} together with data.train {data.train!r}; remove one "
            "of the settings"
        )
    for name in data.train_sets:
        if not _NAME.fullmatch(name):
            yield f"data.train_sets: found the name {name!r}, allowed: letters, digits, _ and -"


def _weights(data: DataConfig) -> Iterator[str]:
    weights = data.train_weights
    if not weights:
        return
    if weights.keys() != data.train_sets.keys():
        names = ", ".join(data.train_sets) or "none"
        yield (
            f"data.train_weights: found {', '.join(weights)}, allowed: the names in "
            f"data.train_sets, {names}"
        )
        return
    smallest = sum(weights.values()) / CYCLE
    for name, weight in weights.items():
        if not math.isfinite(weight) or weight <= 0 or weight < smallest:
            yield (
                f"data.train_weights.{name}: found {weight}, allowed: a positive number, at least "
                f"1/{CYCLE} of the sum of all weights; remove sets that you do not want"
            )


def _is_date(text: str) -> bool:
    try:
        return str(date.fromisoformat(text)) == text
    except ValueError:
        return False
