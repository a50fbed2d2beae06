"""`python -m tests.base.new_role FOLDER`: the role of examples/role.py, and what comes of it in a
run."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from relax_hpc.base.fields import FIELDS
from relax_hpc.config.roles import ROLES
from relax_hpc.examples.role import FIELD, ROLE, novelty, run

ROLES["novelty"] = ROLE
FIELDS["novelty"] = FIELD

from relax_hpc.config.schema import GroupConfig  # noqa: E402
from relax_hpc.queue.client import QueueClient  # noqa: E402
from tests.helpers.queue_helpers import Roles, in_thread, make_run, small  # noqa: E402


def main(path: Path) -> None:
    """The actor gets its rows only once they have the new role's field."""
    run_dir, config = make_run(path / "run"), small(2, 2, steps=1)
    config.groups["novelty"] = GroupConfig(roles=["novelty"])
    with in_thread(run_dir, config), Roles(run_dir, config) as roles:
        version = roles.start()
        roles.generate(version)
        roles.learn(version)
        waits = roles["actor"].submit_claim("actor", 1 << 30)
        assert roles.waits("actor: claim: waits for rows of novelty")
        with QueueClient(run_dir, config, "novelty", 1) as client:
            thread = threading.Thread(
                target=run, args=(SimpleNamespace(client=client),), daemon=True
            )
            thread.start()
            claim = waits.result(20)
            rows = roles["actor"].rows(claim)
            roles["actor"].training.trained(0, [claim.lease]).result()
            roles["actor"].training.checkpoint(1, "i000001-step-000001", "digest").result()
            thread.join(20)
            assert not thread.is_alive(), "the run is finished"
    assert len(rows) == 4 and all(
        np.array_equal(row["novelty"], novelty(row["token_ids"])) for row in rows
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
