"""What the controller must know of rows that are put: by prompt group which samples, their lengths, their versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from relax_hpc.transfer_queue.lengths import packed
from relax_hpc.transfer_queue.row_schema import Row

_LONG = 4096
"""Entries of a row, from which on there are better ways to look at it."""


def summarise(rows: Sequence[Row], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Per prompt group what the controller must know: ticket, which samples, their lengths, versions."""
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        ticket, _, k = row["sample_id"].partition(".")
        summary = groups.setdefault(int(ticket), {"ticket": int(ticket), "mask": 0, "lengths": {}, "versions": set()})
        summary["mask"] |= 1 << int(k)
        if "token_ids" in fields:
            summary["lengths"][int(k)] = len(row["token_ids"])
            summary["versions"] |= _distinct(row["token_versions"][row["prompt_len"] :])
        if "old_logprob_version" in fields:
            summary["versions"].add(int(row["old_logprob_version"]))
    for summary in groups.values():
        lengths = summary["lengths"]
        summary["lengths"] = packed([lengths[k] for k in sorted(lengths)])
        summary["versions"] = sorted(summary["versions"])
    return list(groups.values())


def _distinct(codes: np.ndarray) -> set[int]:
    """The values in ``codes``, of which there is almost always one."""
    # Comparing bytes is cheaper than numpy's reductions for a short row, and dearer for a long one.
    if len(codes) > _LONG:
        alike = codes.min() == codes.max()
    else:
        data = codes.tobytes()
        alike = len(codes) and data == data[: codes.itemsize] * len(codes)
    return {int(codes[0])} if alike else set(np.unique(codes).tolist())
