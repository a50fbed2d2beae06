"""Rows that stay are gathered into one HDF5 file a step, and whatever is killed meanwhile, none of
them is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.config import dump
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.roster import claim_incarnation
from relax_hpc.queue.controller import gathering, server
from relax_hpc.queue.controller.gathering import covered_steps, plan_files
from relax_hpc.queue.inspect.audit import audit
from relax_hpc.queue.inspect.export import KeptRows
from relax_hpc.queue.row_ids import row_ids
from relax_hpc.queue.storage import hdf5_writer
from tests.helpers.queue_helpers import BUDGET, Roles, in_thread, make_run, serve_here, small

pytestmark = pytest.mark.run
STEPS, KEPT, WAIT_S = 4, 2, 30.0
EPISODES = b"\1\2"
"""Rows of those of each prompt group."""


def die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def second_time(function: Callable[[str], None]) -> Callable[[str], None]:
    """``function``, which kills at its second call."""
    calls: list[str] = []

    def counted(path: str) -> None:
        calls.append(path)
        function(path) if len(calls) < 2 else die()

    return counted


POINTS: dict[str, tuple[Any, str, Any]] = {
    "": (None, "", None),
    "a file is written, and not journaled": (server, "journal_files", die),
    "it is journaled, and no shard is removed": (server, "delete_file", die),
    "some shards are removed": (server, "delete_file", second_time(server.delete_file)),
}
"""Where a controller is killed: what is replaced by what."""


def hub(path: Path, incarnation: int, config: Config, point: str) -> None:
    """A controller in a process of its own that dies at a point."""
    place, name, instead = POINTS[point]
    if point:
        setattr(place, name, instead)
    serve_here(path, incarnation, config, gathers=True)


def trained(run: RunDir, config: Config, point: str = "") -> dict[str, dict[str, Any]]:
    """Train with a checkpoint behind the last step but one; the rows of each step. The hub has
    ended at the point, or is ended when there is nothing left to gather."""
    incarnation = claim_incarnation(run, "hub")
    process = multiprocessing.get_context("fork").Process(
        target=hub, args=(run.root, incarnation, config, point)
    )
    process.start()
    try:
        with Roles(run, config, episodes=EPISODES) as roles:
            roles.start()
            rows = {row["row_id"]: row for step in range(STEPS - 1) for row in roles.step(step)}
            roles["actor"].training.checkpoint(step=STEPS - 1, name="c", digest="d")
            if point:
                process.join(WAIT_S)
                assert process.exitcode == -signal.SIGKILL
            else:
                wait_for(
                    lambda: (
                        len(files_of_steps(run)) == KEPT and not list(run.shards.glob("*.shard"))
                    )
                )
    finally:
        process.kill()
        process.join()
    return rows


def wait_for(done: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < until
        time.sleep(0.01)


def files_of_steps(run: RunDir) -> list[Path]:
    return sorted(run.shards.glob("step-*.h5"))


def new_run(path: Path) -> tuple[RunDir, Config]:
    run, config = make_run(path), small(steps=STEPS, keep_steps=KEPT)
    dump(config, run.config)
    return run, config


def check_kept(run: RunDir, rows: dict[str, dict[str, Any]]) -> None:
    """Every row of the steps that are kept is there as it was trained on, whatever kind of file it
    lies in."""
    kept = KeptRows(run)
    assert kept.steps() == list(range(STEPS - 1 - KEPT, STEPS - 1))
    found = {row["row_id"]: row for step in kept.steps() for row in kept.rows(step)}
    assert len(found) == KEPT * 2 * sum(EPISODES) and not kept.absent
    for name, row in found.items():
        for field, value in rows[name].items():
            assert np.array_equal(row[field], value) and type(row[field]) is type(value), (
                name,
                field,
            )


def test_steps_that_stay_become_a_file_each_that_h5py_reads(tmp_path: Path) -> None:
    run, config = new_run(tmp_path / "run")
    rows = trained(run, config)
    check_kept(run, rows)
    first, _ = files_of_steps(run)
    assert first.name == "step-000001-i000001-000001.h5"
    with h5py.File(first) as file:
        names = json.loads(file["row_id"][()])
        assert file.attrs["step"] == 1 and names == [*row_ids(2, EPISODES), *row_ids(3, EPISODES)]
        start, end = file[file["advantages"].attrs["offsets"]][1:3]
        assert np.array_equal(file["advantages"][start:end], rows[names[1]]["advantages"])


@pytest.mark.parametrize("point", [name for name in POINTS if name])
def test_a_controller_that_is_killed_while_it_gathers_loses_nothing(
    tmp_path: Path, point: str
) -> None:
    run, config = new_run(tmp_path / "run")
    rows = trained(run, config, point)
    with in_thread(run, config) as found:
        needed = set(found.state.shards.numbers)
        assert {path.name for path in run.shards.iterdir()} == needed, (
            "no file is missing, and none is left behind"
        )
    check_kept(run, rows)
    assert audit(run, steps=STEPS - 1).problems == []


def test_rows_are_trained_on_again_from_the_file_of_their_step(tmp_path: Path) -> None:
    run, config = new_run(tmp_path / "run")
    rows = trained(run, config)
    with in_thread(run, config), Roles(run, config, incarnation=2) as roles:
        roles["actor"].training.resume(step=STEPS - 2).result()
        claim = roles["actor"].claim("actor", BUDGET)
        assert claim and [shard["name"] for shard in claim.shards] == [files_of_steps(run)[-1].name]
        for row in roles["actor"].rows(claim):
            assert all(
                np.array_equal(value, rows[row["row_id"]][field]) for field, value in row.items()
            )


def test_a_step_that_cannot_be_gathered_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A child that is killed, a damaged shard, and a disk that is full for a while: the run goes
    on."""
    run, config = new_run(tmp_path / "run")
    with in_thread(run, config) as found, Roles(run, config) as roles:
        roles.start()
        for step in range(STEPS - 1):
            roles.step(step)
        roles["actor"].training.checkpoint(step=STEPS - 1, name="c", digest="d").result()
        state = found.state
        work = plan_files(state, covered_steps(state), 1, 0)
        assert [one.step for one in work] == [1, 2]
        monkeypatch.setattr(os, "nice", lambda _: 0)
        whole = hdf5_writer.write

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(hdf5_writer, "write", full)
        assert gathering.write_all(run.shards, work) == 75 and not files_of_steps(run)
        monkeypatch.setattr(hdf5_writer, "write", whole)
        damaged = run.shards / next(iter(work[0].shards.values()))
        damaged.write_bytes(damaged.read_bytes()[:-1])
        assert gathering.write_all(run.shards, work) == 0
        assert [path.name for path in files_of_steps(run)] == [work[1].name]
