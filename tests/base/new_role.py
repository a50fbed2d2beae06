"""`python -m tests.base.new_role FOLDER`: a run with the role of examples/role.py."""

from __future__ import annotations

import json
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.fields import FIELDS, FieldSpec, as_markdown, declare_role_fields
from relax_hpc.config.roles import ROLES, Role
from relax_hpc.examples.role import repeated_share, run

ROLES["watch"] = Role(
    "relax_hpc.examples.role",
    needs=("token_ids", "prompt_len", "reward"),
    fields=(FieldSpec("repeated", "row", "float32", "share of repeated tokens"),),
)
declare_role_fields("watch", ROLES["watch"].fields)

from relax_hpc.config.schema import GroupConfig  # noqa: E402
from relax_hpc.queue.client import QueueClient  # noqa: E402
from relax_hpc.queue.plan import Plan  # noqa: E402
from tests.helpers.queue_helpers import Roles, in_thread, make_run, small  # noqa: E402


def main(path: Path) -> None:
    """The actor gets its rows only once they have the new role's field."""
    run_dir, config = make_run(path / "run"), small(2, 2, steps=1)
    assert Plan.from_config(config).needed == ("token_ids", "reward"), "as without the new role"
    config.groups["watch"] = GroupConfig(roles=["watch"])
    assert Plan.from_config(config).needed == ("token_ids", "prompt_len", "reward")
    check_fields()
    with in_thread(run_dir, config), Roles(run_dir, config) as roles:
        version = roles.start()
        roles.generate(version)
        roles.learn(version)
        waits = roles["actor"].submit_claim("actor", 1 << 30)
        assert roles.waits("actor: claim: waits for rows of watch")
        with QueueClient(run_dir, config, "watch", 1) as client:
            reports: list[tuple[int, dict[str, float]]] = []
            context = SimpleNamespace(
                client=client,
                run=run_dir,
                report=lambda *report: reports.append(report),
                report_phase=lambda phase: None,
                spans=lambda kind, step: nullcontext(),
            )
            thread = threading.Thread(target=run, args=(context,), daemon=True)
            thread.start()
            claim = waits.result(20)
            rows = roles["actor"].rows(claim)
            roles["actor"].training.trained(0, [claim.lease]).result()
            roles["actor"].training.checkpoint(1, "i000001-step-000001", "digest").result()
            thread.join(20)
            assert not thread.is_alive(), "the run is finished"
    assert len(rows) == 4
    for row in rows:
        assert row["repeated"] == pytest.approx(repeated_share(row))
    statistics = json.loads((run_dir.root / "watch/step-000000.json").read_text())
    assert {ticket: entry["rows"] for ticket, entry in statistics.items()} == {"0": 2, "1": 2}
    assert {step for step, _ in reports} == {0}


def check_fields() -> None:
    """A role is the producer of its fields; the docs list the fields of this project only."""
    assert FIELDS["repeated"].by == "watch"
    assert not any("repeated" in line for line in as_markdown())
    with pytest.raises(ConfigError, match="found field reward of role watch, which is also"):
        declare_role_fields("watch", [FieldSpec("reward", "row", "float32", "another one")])
    declare_role_fields("watch", ROLES["watch"].fields)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
