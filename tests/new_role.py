"""`python -m tests.new_role FOLDER`: a role that is an entry and a file, here this one, and what comes of it."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from relax_hpc.config.roles import ROLES, Role
from relax_hpc.fields import FIELDS, FieldSpec

ROLES["novelty"] = Role("tests.new_role", needs=("token_ids",))
FIELDS["novelty"] = FieldSpec("novelty", "token", "float32", "1 where a token is new", by="novelty", loss=True)

from relax_hpc.config.schema import GroupConfig  # noqa: E402
from relax_hpc.transfer_queue.client import QueueClient  # noqa: E402
from tests.queue_helpers import Roles, in_thread, make_run, small  # noqa: E402


def run(context: Any) -> None:
    """Serve until the run is finished."""
    client = context.client
    while claim := client.claim("novelty", 1 << 30):
        made = [{"row_id": row["row_id"], "novelty": novelty(row["token_ids"])} for row in client.rows(claim)]
        client.put(made, ("novelty",), claim)


def novelty(tokens: np.ndarray) -> np.ndarray:
    """1.0 where a token has not come before, else 0.0: [tokens] float32."""
    found = np.zeros(len(tokens), np.float32)
    found[np.unique(tokens, return_index=True)[1]] = 1.0
    return found


def main(path: Path) -> None:
    """The actor gets its rows only once they have the new role's field."""
    run_dir, config = make_run(path / "run"), small(2, 2, steps=1)
    config.groups["novelty"] = GroupConfig(roles=["novelty"])
    with in_thread(run_dir, config), Roles(run_dir, config) as roles:
        version = roles.start()
        roles.generate(version)
        roles.learn(version)
        waits = roles["actor"].claim_later("actor", 1 << 30)
        assert roles.waits("actor: claim: waits for rows of novelty")
        with QueueClient(run_dir, config, "novelty", 1) as client:
            thread = threading.Thread(target=run, args=(SimpleNamespace(client=client),), daemon=True)
            thread.start()
            claim = waits.result(20)
            rows = roles["actor"].rows(claim)
            roles["actor"].training.trained(0, [claim.lease]).result()
            roles["actor"].training.checkpoint(1, "i000001-step-000001", "digest").result()
            thread.join(20)
            assert not thread.is_alive(), "the run is finished"
    assert len(rows) == 4 and all(np.array_equal(row["novelty"], novelty(row["token_ids"])) for row in rows)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
