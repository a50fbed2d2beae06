"""`python -m tests.base.new_fields FOLDER`: two new lines in the table of fields, and what becomes of
their values."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from relax_hpc.base.fields import FIELDS, FieldSpec

NEW = (
    FieldSpec("values", "token", "float32", "expected reward from here", by="rollout", loss=True),
    FieldSpec(
        "routes",
        "token",
        "uint8",
        "experts that were chosen",
        by="rollout",
        tail=(2, 4),
        pad=255,
        loss=True,
    ),
)
# Before anything derives from the table.
FIELDS.update({spec.name: spec for spec in NEW})

import torch  # noqa: E402

from relax_hpc.config.load import dump  # noqa: E402
from relax_hpc.queue.inspect.export import KeptRows, export  # noqa: E402
from relax_hpc.queue.storage.record_file import read  # noqa: E402
from relax_hpc.training.models.batches import collate  # noqa: E402
from relax_hpc.training.trainer import token_batch  # noqa: E402
from tests.helpers.queue_helpers import Roles, in_thread, make_run, rows_of, small  # noqa: E402


def main(path: Path) -> None:
    """The rollout puts them, the actor claims them; a file, an export and the loss's batch have
    them too."""
    run, config = make_run(path / "run"), small(2, 2)
    dump(config, run.root / "config.yaml")
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        made = [row | drawn(row) for row in rows_of(roles.admit(version), version)]
        assert roles["rollout"].put_generated(made) == {}
        roles["rollout"].settle()
        roles.learn(version)
        rows = roles["actor"].rows(roles["actor"].claim("actor", 1 << 20))
        assert same(rows, made)
        written = [
            row for file in run.shards.glob("rollout-*.shard") for row in read(file).values()
        ]
        assert same(sorted(written, key=lambda row: row["row_id"]), made)
        export(KeptRows(run), [0], "jsonl", path / "rows.jsonl")
    told = [json.loads(line) for line in (path / "rows.jsonl").read_text().splitlines()]
    assert [row["routes"] for row in told] == [row["routes"].tolist() for row in made]

    short = {
        name: value[:3] if np.shape(value)[:1] == (5,) else value for name, value in rows[0].items()
    }
    batch = collate([short, *rows[1:]], 0, "cpu")
    assert batch.tokens.shape == (1, 18) and batch.mask.shape == (4, 5)
    given = token_batch(batch, torch.zeros(4, 5), None)
    assert given.values.dtype == torch.float32 and given.routes.dtype == torch.uint8
    assert given.routes.shape == (4, 5, 2, 4) and given.routes[0, 3:].eq(255).all()
    for number, row in enumerate([short, *rows[1:]]):
        size = len(row["token_ids"])
        assert np.array_equal(given.values[number, :size], row["values"])
        assert np.array_equal(given.routes[number, :size], row["routes"])
    assert given.clean().routes[:, :2].eq(0).all(), "nothing is looked at where the mask is 0"


def drawn(row: dict[str, Any], length: int = 5) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(int(row["ticket"]))
    return {
        "values": draw.random(length, np.float32),
        "routes": draw.integers(0, 9, (length, 2, 4), np.uint8),
    }


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> bool:
    """With types."""
    return len(found) == len(expected) and all(
        one[spec.name].dtype == np.dtype(spec.dtype)
        and np.array_equal(one[spec.name], other[spec.name])
        for one, other in zip(found, expected, strict=True)
        for spec in NEW
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
