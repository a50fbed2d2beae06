"""What the controller must know of rows that are put: by prompt group which samples, their lengths, their versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_hpc.transfer_queue.lengths import packed
from relax_hpc.transfer_queue.row_schema import Row, sampled_versions


def summarise(rows: Sequence[Row], fields: Sequence[str]) -> list[dict[str, Any]]:
    """Per prompt group what the controller must know: ticket, which samples, their lengths, versions."""
    groups: dict[int, dict[str, Any]] = {}
    for row in rows:
        ticket, _, k = row["sample_id"].partition(".")
        summary = groups.setdefault(int(ticket), {"ticket": int(ticket), "mask": 0, "lengths": {}, "versions": set()})
        summary["mask"] |= 1 << int(k)
        if "token_ids" in fields:
            summary["lengths"][int(k)] = len(row["token_ids"])
            summary["versions"] |= sampled_versions(row)
        if "old_logprob_version" in fields:
            summary["versions"].add(int(row["old_logprob_version"]))
    for summary in groups.values():
        lengths = summary["lengths"]
        summary["lengths"] = packed([lengths[k] for k in sorted(lengths)])
        summary["versions"] = sorted(summary["versions"])
    return list(groups.values())
