"""Shards that are damaged on disk cost the prompt groups in them, and no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from relax_hpc.config.schema import PlanesConfig
from relax_hpc.rundir import RunDir
from relax_hpc.transfer_queue.claims import DAMAGED, check_claim, sound_claim
from relax_hpc.transfer_queue.shard import ShardError
from relax_hpc.versions import Version
from tests.queue_helpers import BUDGET, Roles, in_thread, make_run, rows_of, small

FILES_ALONE = PlanesConfig(shm="off", rdma="off", tcp="off")


def generated(roles: Roles, version: Version) -> list[int]:
    """Prompt groups, each in a shard of its own; their tickets."""
    tickets = roles.admit(version)
    for ticket in tickets:
        assert roles["rollout"].generated(rows_of([ticket], version)) == {}
    roles["rollout"].settle()
    return tickets


def newest_shard(run: RunDir) -> Path:
    return max(run.shards.glob("rollout-*.h5"))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 :] = bytes(byte ^ 0x55 for byte in data[len(data) // 2 :])
    path.write_bytes(data)


@pytest.mark.parametrize("damage", [cut, flip])
def test_groups_in_a_damaged_shard_are_generated_again(tmp_path, damage):
    run, config = make_run(tmp_path / "run"), small()
    config.queue.planes = FILES_ALONE
    with in_thread(run, config), Roles(run, config) as roles:
        version = roles.start()
        tickets = generated(roles, version)
        damage(newest_shard(run))
        assert not check_claim(roles["reference"], roles["reference"].claim("reference", BUDGET))
        assert roles["actor"].call("status")["dropped"] == {DAMAGED: config.samples_per_group}
        assert roles.admit(version) == tickets[-1:]
        assert roles["rollout"].generated(rows_of(tickets[-1:], version)) == {}
        roles["rollout"].settle()
        claims = [sound_claim(roles["reference"], "reference", BUDGET) for _ in tickets]
        assert [ticket for claim in claims for ticket in claim.tickets] == tickets


def test_a_shard_that_is_not_there_is_no_damage(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    config.queue.planes = FILES_ALONE
    with in_thread(run, config), Roles(run, config) as roles:
        generated(roles, roles.start())
        newest_shard(run).unlink()
        claim = roles["reference"].claim("reference", BUDGET)
        with pytest.raises(ShardError):
            check_claim(roles["reference"], claim)
        assert not roles["actor"].call("status")["dropped"]
