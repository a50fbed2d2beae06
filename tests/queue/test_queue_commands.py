"""`relax-hpc queue audit` and `export` as a user calls them: on runs that live, were killed or are
damaged."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.base.rundir import RunDir
from relax_hpc.base.versions import Version
from relax_hpc.commands.program import main
from relax_hpc.config import dump
from relax_hpc.config.schema import Config
from relax_hpc.queue.controller.journal import Journal
from relax_hpc.queue.inspect import export
from relax_hpc.queue.inspect.audit import Audit, Ledger, audit
from relax_hpc.queue.inspect.journal_copy import journal_records
from relax_hpc.queue.plan import Plan
from relax_hpc.training.models.tiny_tokenizer import write_tokenizer
from tests.helpers.checked_queue import GROUPS
from tests.helpers.queue_helpers import (
    BUDGET,
    GIVES,
    HubProcess,
    Roles,
    in_thread,
    learned,
    make_run,
    small,
)
from tests.helpers.queue_world import World
from tests.requirements import requires

STEPS, TRAINED = 4, 3


def new_run(path: Path, **config: int) -> tuple[RunDir, Config]:
    """Its rows are accepted as they are put: they are on disk at once."""
    run, made = make_run(path), small(steps=STEPS, **config)
    made.queue.memory_bytes = 0
    dump(made, run.config)
    return run, made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 3 trained steps of 4 samples, the fourth being generated; step 0 is not kept any
    more."""
    run, config = new_run(tmp_path_factory.mktemp("queue") / "run", keep_steps=1)
    with in_thread(run, config), Roles(run, config) as roles:
        roles.start()
        for step in range(TRAINED):
            roles.step(step)
            roles["actor"].connection.call(
                "checkpoint", step=min(step + 1, 2), name="c", digest="d"
            )
        roles.generate(Version(1, TRAINED))
    return run.root


@pytest.fixture
def run(made: Path, tmp_path: Path) -> RunDir:
    """A copy of it, to be damaged."""
    return RunDir(shutil.copytree(made, tmp_path / "run"))


def call(*words: object) -> int:
    return main(["queue", *map(str, words)])


def audited(
    run: RunDir, capsys: pytest.CaptureFixture[str], code: int = EXIT_DONE
) -> dict[str, Any]:
    """What --json says."""
    assert call("audit", run.root, "--json") == code
    return json.loads(capsys.readouterr().out)


def rewrite(run: RunDir, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> None:
    """Give the run a journal of other records."""
    records = change(list(journal_records(run)))
    shutil.rmtree(run.journal)
    run.journal.mkdir()
    journal = Journal(run.journal, 1, durable=False)
    assert not list(journal.replay())
    for record in records:
        journal.append(record)
    journal.close()


def last_record(records: list[dict[str, Any]], op: str, **fields: Any) -> dict[str, Any]:
    """The last of ``records`` with this operation and these fields."""
    expected = {"op": op, **fields}
    return [record for record in records if expected.items() <= record.items()][-1]


# -- audit -----------------------------------------------------------------------------------------


def test_a_run_that_was_ended_early(run, capsys):
    assert call("audit", run.root) == EXIT_DONE
    assert capsys.readouterr().out.splitlines()[1:] == [
        "accepted            16  rows; a row that was dropped and accepted again counts each time",
        "trained             12  once, by steps that were not rolled back",
        "dropped              0",
        "in flight            4  to be consumed by: actor 4, actor_fwd 4, advantages 4, "
        "reference 4",
        "torn bytes           0",
        "consumed by: actor 12, actor_fwd 12, advantages 12, reference 12",
        "nothing is wrong",
    ]
    found = audited(run, capsys)
    assert (found["state"], found["trained_steps"], found["steps"]) == (
        "not running",
        TRAINED,
        STEPS,
    )


def test_a_finished_run_by_its_program(tmp_path):
    run, config = new_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        roles.start()
        for step in range(STEPS):
            roles.step(step)
    run.finished.write_text('{"dropped": {}}')
    words = [sys.executable, "-m", "relax_hpc", "queue", "audit", str(run.root)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stderr) == (EXIT_DONE, "")
    assert "finished, 4 of 4 steps trained" in result.stdout and "nothing is wrong" in result.stdout
    assert audit(run) == Audit(
        accepted=16, trained=16, consumed=Counter(dict.fromkeys((*GIVES, "actor"), 16))
    )


def test_a_live_run_says_so(tmp_path, capsys):
    run, config = new_run(tmp_path / "run")
    with in_thread(run, config), Roles(run, config) as roles:
        roles.generate(roles.start())
        claim = roles["reference"].claim("reference", BUDGET)
        roles["reference"].put(
            learned(roles["reference"].rows(claim), Version(1, 0)), GIVES["reference"], claim
        )
        assert call("audit", run.root) == EXIT_DONE
        text = capsys.readouterr().out
        assert "live, 0 of 4 steps trained" in text and "numbers of a moment ago" in text
        found = audited(run, capsys)
    assert (
        found["waiting_for"] == {"actor": 4, "actor_fwd": 4, "advantages": 4}
        and found["in_flight"] == 4
    )


def test_a_run_of_which_nothing_began(tmp_path, capsys):
    run, _ = new_run(tmp_path / "run")
    assert audited(run, capsys)["accepted"] == 0
    shutil.rmtree(run.journal)
    assert audited(run, capsys)["journal_records"] == 0


def test_a_killed_run_with_a_torn_tail(tmp_path, capsys):
    run, config = new_run(tmp_path / "run")
    with HubProcess(run) as hub, Roles(run, config) as roles:
        roles.start()
        roles.step(0)
        roles.generate(Version(1, 1))
        hub.kill()
    (journal,) = run.journal.iterdir()
    whole = journal.read_bytes()
    journal.write_bytes(whole + whole[:7])
    run.events.write_bytes(run.events.read_bytes()[:-30])
    found = audited(run, capsys)
    assert found["torn_bytes"] == {"inc-000001.journal": 7}
    assert (found["accepted"], found["trained"], found["in_flight"]) == (8, 4, 4)
    assert journal.read_bytes() == whole + whole[:7], "the run's own files stay as they are"
    assert call("audit", run.root) == EXIT_DONE
    assert "torn bytes           7  inc-000001.journal 7" in capsys.readouterr().out


def test_what_a_fenced_controller_still_wrote_does_not_count(run, capsys):
    first = run.journal / "inc-000001.journal"
    with in_thread(run, small(steps=STEPS)):
        pass
    before = audited(run, capsys)
    assert before["torn_bytes"] == {}
    first.write_bytes(first.read_bytes() * 2)
    size = first.stat().st_size // 2
    assert audited(run, capsys) == before | {"torn_bytes": {first.name: size}}


@contextmanager
def resumed_at_the_start(run: RunDir, config: Config) -> Iterator[Roles]:
    """Step 0 was trained, and rows of step 1 generated; then the actor went back to step 0, and
    trained it again."""
    with Roles(run, config) as roles:
        roles.start()
        roles.step(0)
        roles.generate(Version(1, 1))
    with Roles(run, config, incarnation=2) as roles:
        roles.start()
        roles.train(0)
        yield roles


def test_drops_are_told_by_reason(tmp_path, capsys):
    """The actor goes back to step 0: what its later weights sampled is dropped, and generated
    again."""
    run, config = new_run(tmp_path / "run")
    with in_thread(run, config), resumed_at_the_start(run, config) as roles:
        ticket = roles.admit(Version(2, 1))[0]
        roles["rollout"].connection.call("fail", ticket=ticket, attempt=0, reason="timeout")
    found = audited(run, capsys)
    assert found["dropped"] == {"rolled_back": 4} and found["never_accepted"] == {"timeout": 2}
    assert (found["accepted"], found["trained"], found["in_flight"]) == (8, 4, 0)


@pytest.mark.parametrize(
    "command", [["audit"], ["export", "--step", "1", "--output", "rows.jsonl"]]
)
def test_a_damaged_middle_is_named_with_its_offset(run, command, capsys, monkeypatch):
    monkeypatch.chdir(run.root)
    (path,) = run.journal.iterdir()
    journal = bytearray(path.read_bytes())
    journal[len(journal) // 2] ^= 1
    path.write_bytes(journal)
    assert call(command[0], run.root, *command[1:]) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and f"{path}: " in captured.err
    offset = int(captured.err.partition("at offset ")[2])
    assert 0 < offset <= len(journal) // 2
    assert not Path("rows.jsonl").exists()


def test_records_that_do_not_follow_from_each_other_are_named(run, capsys):
    rewrite(run, lambda records: [r for r in records if r["op"] != "admit"])
    assert call("audit", run.root) == EXIT_CONFIG
    assert (
        "record " in (error := capsys.readouterr().err)
        and "(put) cannot follow the records before it" in error
    )


def test_a_finished_run_with_half_a_journal(run, capsys):
    run.finished.write_text("{}")
    (problem,) = audited(run, capsys, EXIT_CONFIG)["problems"]
    assert problem == "the run is marked finished, its journal has 3 of 4 steps trained"


def consumed_again(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reference puts once more what it has put."""
    put = last_record(records, "put", fields=["ref_logprobs"])
    claim = last_record(records, "claim", number=put["lease"])
    return [
        *records,
        claim | {"number": 99, "key": "x"},
        put | {"lease": 99, "key": "y", "shard": {"name": "z"}},
    ]


def trained_again(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    claim = last_record(records, "claim", task="actor")
    return [
        *records,
        claim | {"number": 99, "key": "x"},
        last_record(records, "trained") | {"leases": [99]},
    ]


def never_consumed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The reference had no part in the last step."""
    put = last_record(records, "put", fields=["ref_logprobs"])
    return [
        r
        for r in records
        if r is not put and r is not last_record(records, "claim", number=put["lease"])
    ]


def accepted_again(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """As if nobody remembered the first time."""
    put = last_record(records, "put", lease=0)
    return [*records, put | {"key": "y", "shard": {"name": "z"}}]


@pytest.mark.parametrize(
    ("change", "says", "samples"),
    [
        (consumed_again, "consumed 2 times by reference", 4),
        (never_consumed, "consumed 0 times by reference", 4),
        (trained_again, "trained 2 times in the surviving lineage", 4),
        (accepted_again, "accepted again without having been dropped", 4),
    ],
)
def test_what_is_not_once_is_wrong(run, change, says, samples, capsys):
    rewrite(run, change)
    run.events.unlink()
    found = audited(run, capsys, EXIT_CONFIG)
    assert sum(says in problem for problem in found["problems"]) == samples, found["problems"]
    assert len(found["duplicated"]) == (samples if change is trained_again else 0)
    assert call("audit", run.root) == EXIT_CONFIG
    assert "wrong: 0000000" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("old", "new"), [(b'"admitted"', b'"readmitted"'), (b"\n", b"\n{}\n"), (b"{", b"")]
)
def test_events_that_the_journal_does_not_have_are_wrong(run, old, new, capsys):
    run.events.write_bytes(run.events.read_bytes().replace(old, new, 1))
    (problem,) = audited(run, capsys, EXIT_CONFIG)["problems"]
    assert problem.startswith("events.jsonl has ") and " is the first that differs" in problem


def test_a_task_that_joined_later_owes_nothing_of_before(tmp_path, capsys):
    run, config = new_run(tmp_path / "run")
    reference = config.groups.pop("reference")
    with in_thread(run, config), Roles(run, config) as roles:
        roles.generate(roles.start())
        for role in ("actor_fwd", "advantages"):
            claim = roles[role].claim(role, BUDGET)
            roles[role].put(learned(roles[role].rows(claim), Version(1, 0)), GIVES[role], claim)
        roles.train(0)
    config.groups["reference"] = reference
    dump(config, run.config)
    with in_thread(run, config), Roles(run, config, 2) as roles:
        roles["actor"].connection.call("resume", step=1)
        roles["actor"].connection.call("publish", version=str(Version(2, 1)), digest="d")
        roles.generate(Version(2, 1))
        roles.learn(Version(2, 1))
        roles.train(1)
    assert audited(run, capsys)["consumed_by"] == {
        "actor": 8,
        "actor_fwd": 8,
        "advantages": 8,
        "reference": 4,
    }


@pytest.mark.parametrize("seed", range(4))
def test_random_faults_leave_nothing_wrong(tmp_path, seed):
    """The audit and an account kept beside the queue agree, at any moment."""
    chance = random.Random(seed)
    config = small(2, 2, 6, seed, keep_steps=seed % 3)
    world = World(Plan.from_config(config), 1000)
    for count in range(300):
        role = chance.choice(sorted(GROUPS))
        if chance.random() < 0.03:
            world.kill(role, chance.random() < 0.5)
            world.older = chance.choice([0, 0, 1, 2])
        world.act(role, chance.randrange(20))
        if count % 60 == 59:
            assert_as_accounted(world, config, tmp_path / f"{count}")
    world.go_to_the_end()
    rows = sum(map(sum, world.declared.values()))
    assert assert_as_accounted(world, config, tmp_path / "end").trained == rows > 24


def assert_as_accounted(world: World, config: Config, path: Path) -> Audit:
    run = make_run(path)
    dump(config, run.config)
    rewrite(
        run,
        lambda _: [
            msgpack.unpackb(record, strict_map_key=False) for record in world.service.journal
        ],
    )
    ledger = Ledger(run)
    found = ledger.judge(ledger.state.progress.trained_steps)
    places = Counter(world.status.values())
    failed = {reason: 2 * count for reason, count in found.failed.items()}
    counted, dropped = world.service.state.counts.dropped, found.dropped + Counter(failed)
    # Of what it has retired the queue does not know any more how many rows there were.
    assert found.problems == [] and {**dropped, "retired": 0} == {**counted, "retired": 0}
    assert (found.in_flight, found.trained) == (places["accepted"], places["trained"])
    assert found.accepted == found.trained + found.in_flight + sum(
        (found.dropped - found.refused).values()
    )
    return found


# -- export ----------------------------------------------------------------------------------------


def exported(run: RunDir, *words: object) -> list[dict[str, Any]]:
    output = run.root / "rows.jsonl"
    assert call("export", run.root, *words, "--output", output) == EXIT_DONE
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_rows_of_a_step_with_all_their_fields(run, capsys):
    rows = exported(run, "--step", 1)
    assert capsys.readouterr().out == f"{run.root / 'rows.jsonl'}: 4 rows of step 1\n"
    assert [row["row_id"] for row in rows] == [
        "000000002.00.00",
        "000000002.01.00",
        "000000003.00.00",
        "000000003.01.00",
    ]
    row = rows[1]
    assert (row["step"], row["trained"], row["versions"]) == (
        1,
        "i000001-v000001",
        ["i000001-v000001"],
    )
    assert (row["token_ids"], row["loss_mask"]) == ([210, 211, 212, 213, 214], [0, 0, 1, 1, 1])
    assert (row["ref_logprobs"], row["advantages"]) == ([-4.0] * 5, [0.0, 0.0, 1.0, 1.0, 1.0])
    assert (row["prompt_id"], row["finish_reason"], row["spans"], row["reward"]) == (
        "p2",
        "stop",
        [],
        1.0,
    )


def test_rows_say_what_their_tokens_say(run, capsys):
    exported(run, "--step", 1)
    assert "the rows have no text: " in capsys.readouterr().err
    run.model.mkdir()
    write_tokenizer(run.model)
    row = exported(run, "--step", 1)[0]
    assert type(row["prompt"]) is type(row["response"]) is str and not capsys.readouterr().err
    kept = export.KeptRows(run)
    kept.decode_tokens = str
    assert (kept.rows(1)[0]["prompt"], kept.rows(1)[0]["response"]) == (
        "[200, 201]",
        "[202, 203, 204]",
    )


def test_rows_of_several_steps_also_of_those_not_trained(run):
    rows = exported(run, "--steps", "1-3")
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4 + [3] * 4
    assert rows[-1]["trained"] is None and "ref_logprobs" not in rows[-1]


def test_rows_that_were_generated_again_are_the_later_ones(tmp_path):
    run, config = new_run(tmp_path / "run")
    with in_thread(run, config), resumed_at_the_start(run, config) as roles:
        roles.generate(Version(2, 1))
    assert {row["trained"] for row in exported(run, "--step", 0)} == {"i000002-v000000"}
    assert {tuple(row["versions"]) for row in exported(run, "--step", 1)} == {("i000002-v000001",)}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--step", "0"], "no rows of step 0; steps 1-3 are kept (queue.keep_steps"),
        (["--steps", "3-999999999"], "no rows of step 4; steps 1-3 are kept"),
        (["--steps", "3-1"], "command line: --steps: found '3-1', allowed: A-B"),
        (["--steps", "1"], "command line: --steps: found '1', allowed: A-B"),
        ([], "command line: give one of --step N and --steps A-B"),
        (["--step", "1", "--steps", "1-2"], "command line: give one of --step N and --steps A-B"),
        (["--step", "one"], "step: found 'one'"),
        (
            ["--step", "1", "--json"],
            "command line: --json: unknown option",
        ),
        (["--step", "1", "--format", "csv"], "--format: found 'csv', allowed: jsonl, parquet"),
        (["--step", "1", "--output", "gone/rows.jsonl"], "gone: no such folder"),
        (["--step", "1", "--output", ""], "--output: found nothing"),
    ],
)
def test_wrong_use_of_export(run, words, says, capsys, monkeypatch):
    monkeypatch.chdir(run.root)
    assert call("export", run.root, "--output", "rows.jsonl", *words) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err
    assert not list(run.root.glob("*rows*"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["audit"], "required: run"),
        (["audits", "x"], "queue audits: unknown verb, allowed: audit, export"),
        (["audit", "gone"], "gone: no run here"),
        (["audit", "x", "--step", "1"], "command line: --step: unknown option"),
    ],
)
def test_wrong_use(words, says, capsys):
    assert call(*words) == EXIT_CONFIG
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and says in captured.err


def test_a_damaged_shard_is_named(run, capsys):
    path = max(run.shards.iterdir(), key=lambda path: path.stat().st_size)
    path.write_bytes(path.read_bytes()[:-64])
    assert (
        call("export", run.root, "--steps", "1-3", "--output", run.root / "rows.jsonl")
        == EXIT_CONFIG
    )
    assert f"{path}: " in capsys.readouterr().err


@pytest.mark.timeout(30)
def test_a_pipe_in_the_place_of_a_shard_is_not_opened(run, capsys):
    path = next(run.shards.iterdir())
    path.unlink()
    os.mkfifo(path)
    assert (
        call("export", run.root, "--steps", "1-3", "--output", run.root / "rows.jsonl")
        == EXIT_CONFIG
    )
    assert f"{path}: [Errno 22] a FIFO, expected a regular file" in capsys.readouterr().err


def test_rows_whose_shards_are_gone_are_counted(run, capsys):
    for path in run.shards.glob("rollout-*"):
        path.unlink()
    assert exported(run, "--step", 1) == []
    assert (
        f"2 prompt groups left out: their shards are not, or no longer, in {run.shards}"
        in capsys.readouterr().err
    )


def test_parquet_without_its_package_says_what_to_install(run, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    output = run.root / "rows.parquet"
    assert (
        call("export", run.root, "--step", "1", "--format", "parquet", "--output", output)
        == EXIT_CONFIG
    )
    assert "pip install pyarrow" in capsys.readouterr().err and not output.exists()


def test_parquet_has_the_same_rows(run):
    requires("pyarrow")
    from pyarrow import parquet

    output = run.root / "rows.parquet"
    assert (
        call("export", run.root, "--steps", "1-3", "--format", "parquet", "--output", output)
        == EXIT_DONE
    )
    rows = parquet.read_table(output).to_pylist()
    for found, expected in zip(rows, exported(run, "--steps", "1-3"), strict=True):
        assert json.loads(found.pop("spans")) == expected.pop("spans")
        assert {
            name: value for name, value in found.items() if value is not None or name == "trained"
        } == expected
    assert str(parquet.read_schema(output).field("token_ids").type) == "list<element: int32>"


def test_what_the_schema_does_not_know_is_kept(tmp_path):
    row = {
        "row_id": "000000000.00.00",
        "picture": b"ab",
        "mood": {"a": [1]},
        "reward": np.float32(0.5),
    }
    export.write_jsonl(tmp_path / "a", [[row]])
    assert json.loads((tmp_path / "a").read_text()) == row | {"picture": "YWI=", "reward": 0.5}
    assert json.loads(export._cell(row, "other")) == {"picture": "YWI=", "mood": {"a": [1]}}
