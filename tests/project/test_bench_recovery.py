"""The recovery benchmark's command line, its arithmetic on faults that are made up, and its
table."""

from __future__ import annotations

import json
import math
import os
from typing import Any

import pytest

from relax_hpc.base.rundir import RunDir
from relax_hpc.net.rendezvous.roster import claim_incarnation


@pytest.fixture
def figures(bench):
    return bench("recovery_figures")


def a_record(figures, **over: Any):
    """A rank of the engines is killed at 100 s: noticed after 0.1 s, started at 100.3, there at
    104, works at 105."""
    values: dict[str, Any] = {
        "layout": "het",
        "policy": "toolkit",
        "fault": "kill:rollout",
        "victim": "rollout",
        "beat_s": 1.0,
        "lease_s": 5.0,
        "at": 100.0,
        "step": 7,
        "detected": 100.1,
        "launched": 100.3,
        "beaten": 104.0,
        "accepted": [100.05, 103.0, 105.0, 105.1],
        "steps": [(99.8, 7), (100.2, 8), (105.5, 9), (105.7, 10)],
        "gaps": {"actor/actor": 1.01, "actor_fwd/actor_fwd": 1.5},
    }
    return figures.Record(**values | over)


def test_figures_of_an_exit(figures):
    found = figures.result(a_record(figures))
    assert found.detect == pytest.approx(0.1) and found.restart == pytest.approx(0.2)
    # What was under way when it died does not show it at work.
    assert found.working == pytest.approx(5.0) and found.caught_up == pytest.approx(5.5)
    assert found.others == 1.5 and found.training == pytest.approx(5.3) and found.again == 0
    assert figures.missed(a_record(figures)) == []


def test_an_actor_that_went_back_trains_steps_again(figures):
    steps = [(99.8, 7), (100.1, 8), (104.4, 6), (104.5, 7), (104.6, 8), (104.7, 9)]
    found = figures.result(a_record(figures, fault="kill:actor", victim="actor", steps=steps))
    assert (found.working, found.caught_up) == (pytest.approx(4.4), pytest.approx(4.7))
    assert found.again == 3 and math.isnan(found.training)


def test_waiting_in_the_queue_is_no_part_of_a_restart(figures):
    late = a_record(figures, launched=110.1, queued_s=8.0, new_job=True)
    assert figures.result(late).restart == pytest.approx(2.0) and figures.missed(late) == []
    assert figures.missed(a_record(figures, launched=110.1, queued_s=2.0, new_job=True)) == [
        "restart"
    ]
    # As a step it would have to be quicker.
    assert figures.missed(a_record(figures, launched=102.2)) == ["restart"]


def test_targets_depend_on_the_fault(figures):
    slow = {
        "detected": 106.5,
        "launched": 107.0,
        "beaten": 111.0,
        "accepted": [112.0],
        "steps": [(99.8, 7), (112.5, 8)],
    }
    assert figures.missed(a_record(figures, **slow)) == ["detect"]
    assert figures.missed(a_record(figures, fault="node:rollout", **slow)) == []
    assert figures.missed(a_record(figures, policy="restart-all", **slow)) == []
    assert figures.missed(a_record(figures, gaps={"actor/actor": 2.1}, lost=1)) == [
        "others",
        "lost",
    ]


def test_what_never_came_is_said(figures):
    gone = a_record(
        figures,
        launched=figures.NEVER,
        beaten=figures.NEVER,
        accepted=[],
        steps=[(99.8, 7)],
        gaps={},
    )
    found = figures.result(gone)
    assert found.restart == found.working == found.caught_up == math.inf
    assert math.isnan(found.others) and math.isnan(found.training)
    assert figures.missed(gone) == ["restart", "working", "caught_up"]
    assert "never" in figures.table([gone])[1]


def test_samples_are_on_the_account_of_the_fault_that_reached_their_step(figures):
    first = a_record(figures, at=100.0, step=7, steps=[(99.8, 7), (104.5, 5), (104.6, 6)])
    second = a_record(figures, at=200.0, step=30, steps=[(199.8, 30), (204.5, 31)])
    assert figures.share(["20.0", "120.3", "124.0", "127.3"], [first, second], 4) == [2, 2]
    assert figures.share(["0.0"], [first, second], 4) == [1, 0]


def test_quantiles_are_values_that_were_seen(figures):
    assert figures.quantile([3.0, 1.0, 2.0], 0.5) == 2.0
    assert figures.quantile([3.0, 1.0, 2.0], 0.95) == 3.0
    assert figures.quantile([4.0], 0.95) == 4.0


def test_table_has_a_line_for_each_fault_and_policy(figures):
    again = a_record(figures, policy="restart-all", detected=100.2, new_job=True, helped="by hand")
    lines = figures.table([a_record(figures), a_record(figures, detected=100.4), again])
    assert len(lines) == 3 and len({line.index("kill") for line in lines[1:]}) == 1
    assert lines[1].split()[:4] == ["het", "kill:rollout", "toolkit", "0.10/0.40"] and lines[
        1
    ].endswith("ok")
    assert "0.10*" in lines[2] and lines[2].endswith("by hand")


def test_all_faults_of_both_layouts_are_measured_unless_told_otherwise(bench):
    recovery = bench("recovery")
    args = recovery.parse([])
    assert (
        args.layout == ["het", "jobs"]
        and args.policy == ["toolkit", "restart-all"]
        and args.repeat == 1
    )
    assert args.fault == recovery.all_faults() and {
        "kill:controller",
        "node:hub",
        "scancel:actor",
    } < set(args.fault)
    assert {fault.partition(":")[2] for fault in args.fault} == recovery.GROUPS.keys()
    args = recovery.parse(
        ["--layout", "jobs", "--fault", "kill:actor", "--fault", "node:hub", "--repeat", "3"]
    )
    assert (args.layout, args.fault, args.repeat) == (["jobs"], ["kill:actor", "node:hub"], 3)


@pytest.mark.parametrize(
    "words", [["--fault", "kill:nobody"], ["--repeat", "0"], ["--layout", "local"]]
)
def test_a_wrong_word_ends_it_before_anything_starts(bench, words, capsys):
    with pytest.raises(SystemExit):
        bench("recovery").parse(words)
    assert words[0] in capsys.readouterr().err


def test_settings_make_a_run(bench, tmp_path):
    from relax_hpc.cluster.slurm.layout import components
    from relax_hpc.config import load

    for layout in ("het", "jobs"):
        path = tmp_path / f"{layout}.yaml"
        path.write_text(json.dumps(bench("recovery").settings(layout)))
        config = load([path], {"run_dir": str(tmp_path / "run"), "layout": layout})
        assert sum(part.nodes for part in components(config)) == 7


def test_a_file_is_followed_through_its_replacement(bench, tmp_path):
    path = tmp_path / "events"
    tail = bench("recovery_run").Tail(path)
    assert tail.lines() == (False, [])
    path.write_text("one\ntw")
    assert tail.lines() == (True, [b"one"])
    with path.open("a") as file:
        file.write("o\n")
    assert tail.lines() == (False, [b"two"])
    other = tmp_path / "other"
    other.write_text("one\n")
    other.replace(path)
    assert tail.lines() == (True, [b"one"])


def test_times_of_slurm_are_local(bench):
    run = bench("recovery_run")
    assert run.moment("2024-05-01T12:00:10") - run.moment("2024-05-01T12:00:00") == 10.0
    assert run.moment("Unknown") == run.moment("") == 0.0


def test_the_next_incarnation_is_found_by_the_files_that_it_writes(bench, tmp_path):
    run = object.__new__(bench("recovery_run").Run)
    run.run = RunDir(tmp_path)
    for number in (1, 2):
        assert claim_incarnation(run.run, "actor") == number
        at = 100.0 * number
        os.utime(run.run.rendezvous("actor") / f"inc-{number:06d}.claim", (at, at))
    assert run.first("actor", "inc-*.claim", 150.0) == (200.0, 2)
    assert run.first("actor", "inc-*.claim", 250.0) == (math.inf, 0)
