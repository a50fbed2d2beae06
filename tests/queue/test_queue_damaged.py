"""Shards that are damaged on disk cost the prompt groups in them, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import PlanesConfig
from relax_hpc.queue.client import claims
from relax_hpc.queue.client.claims import DAMAGED, MISSING, check_claim, claim_valid
from tests.helpers.queue_helpers import BUDGET, Roles, in_thread, make_run, rows_of, small

FILES_ALONE = PlanesConfig(shm="off", rdma="off", tcp="off")


def generated(roles: Roles, version: Version) -> list[int]:
    """Prompt groups, each in a shard of its own; their tickets."""
    tickets = roles.admit(version)
    for ticket in tickets:
        assert roles["rollout"].put_generated(rows_of([ticket], version)) == {}
    roles["rollout"].settle()
    return tickets


def newest_shard(run: RunDir) -> Path:
    return max(run.shards.glob("rollout-*.shard"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(byte ^ 0x55 for byte in data[len(data) // 2 :])
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("damage", "reason"), [(cut, DAMAGED), (flip, DAMAGED), (Path.unlink, MISSING)]
)
def test_groups_in_a_damaged_shard_are_generated_again(tmp_path, damage, reason, monkeypatch):
    monkeypatch.setattr(claims, "APPEARS_S", 0.0)
    run, config = make_run(tmp_path / "run"), small()
    config.queue.planes = FILES_ALONE
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = generated(roles, version)
        damage(newest_shard(run))
        assert not check_claim(roles["reference"], roles["reference"].claim("reference", BUDGET))
        assert roles["actor"].connection.call("status")["dropped"] == {
            reason: config.samples_per_prompt
        }
        assert roles.admit(version) == tickets[-1:]
        assert roles["rollout"].put_generated(rows_of(tickets[-1:], version)) == {}
        roles["rollout"].settle()
        found = [claim_valid(roles["reference"], "reference", BUDGET) for _ in tickets]
        assert [ticket for claim in found for ticket in claim.tickets] == tickets


def test_a_file_that_is_seen_late_is_no_damage(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "_POLL_S", 0.01)
    run, config = make_run(tmp_path / "run"), small()
    config.queue.planes = FILES_ALONE
    with in_thread(run, config), Roles(run, config) as roles:
        tickets, path = generated(roles, roles.start()), newest_shard(run)
        hidden = path.rename(path.with_suffix(".hidden"))
        looked = claims._absent_shards

        def unseen(*about):
            found = looked(*about)
            if not hidden.exists():
                return found
            hidden.rename(path)
            return found

        monkeypatch.setattr(claims, "_absent_shards", unseen)
        found = claim_valid(roles["reference"], "reference", BUDGET)
        assert found and set(found.tickets) <= set(tickets)
        assert not roles["actor"].connection.call("status")["dropped"] and not hidden.exists()
