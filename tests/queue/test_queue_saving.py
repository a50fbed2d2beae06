"""Rows that can be read before they are on disk: when they count, and what becomes of them if their
maker dies."""

from __future__ import annotations

import pytest

from relax_hpc.base.versions import Version
from relax_hpc.queue.client import QueueClient
from relax_hpc.queue.lengths import pack_lengths
from relax_hpc.queue.plan import GENERATED, Plan
from tests.helpers.queue_helpers import GIVES, in_thread, make_run, small
from tests.helpers.queue_in_memory import InMemory, contents, refused_kind

V0 = Version(1, 0)
WINDOW = {"budget": 1000, "boundary": 2}


class Scene:
    """One step of two prompt groups, made by hand; rows of ``late`` roles are put before they are
    saved."""

    def __init__(self, late: tuple[str, ...] = (), staleness: int = 0) -> None:
        self.service = InMemory(Plan.from_config(small(staleness=staleness)))
        self.late, self.asked = late, 0
        self.ask("actor", "resume", step=0)
        self.ask("actor", "publish", version=str(V0), digest="d")

    def ask(self, group: str, op: str, incarnation: int = 1, /, **args):
        self.asked += 1
        return self.service.ask(group, incarnation, str(self.asked), op, **args)

    def put(
        self,
        group: str,
        name: str,
        tickets: list[int],
        lease: int = 0,
        incarnation: int = 1,
        fields=GENERATED,
    ) -> dict:
        codes = [V0.encode()] if group in ("rollout", "actor_fwd") else []
        lengths = pack_lengths([5, 5]) if group == "rollout" else b""
        rows = [
            {"ticket": ticket, "episodes": b"\1\1", "lengths": lengths, "versions": codes}
            for ticket in tickets
        ]
        put = {
            "shard": {"name": name, "bytes": 10},
            "rows": rows,
            "fields": list(fields),
            "lease": lease,
        }
        return self.ask(group, "put", incarnation, **put, saved=group not in self.late)["refused"]

    def generate(self, name: str = "gen", incarnation: int = 1) -> list[int]:
        self.ask("rollout", "serve", incarnation, reader="r", version=str(V0))
        tickets = self.ask("rollout", "admit", incarnation, reader="r", count=9)["tickets"]
        assert self.put("rollout", name, tickets, incarnation=incarnation) == {}
        return tickets

    def learn(self, group: str, name: str, incarnation: int = 1, task: str = "") -> None:
        task = task or group
        claim = self.ask(group, "claim", incarnation, task=task, **WINDOW)
        assert (
            self.put(group, name, claim["tickets"], claim["lease"], incarnation, GIVES[task]) == {}
        )

    def learn_all(self) -> None:
        self.learn("actor_fwd", "old")
        self.learn("reference", "ref")
        self.learn("hub", "adv", task="advantages")

    def told(self) -> list[str]:
        """Kinds of events since the last call, each once, in their order."""
        return list(dict.fromkeys(event.what for event in self.service.state.events.take()))

    def check(self) -> None:
        assert contents(self.service.replayed()) == contents(self.service.state)


def test_rows_are_read_at_once_and_accepted_when_they_are_saved():
    it = Scene(late=("rollout",))
    assert it.generate() == [0, 1]
    assert it.told() == ["admitted"] and it.service.state.counts.accepted == 0
    assert it.ask("reference", "claim", task="reference", **WINDOW)["shards"][0]["name"] == "gen"
    for _ in range(2):
        assert it.ask("rollout", "saved", names=["gen"]) == {}
    assert it.told() == ["accepted"] and it.service.state.counts.accepted == 4
    it.service.restart()
    assert it.ask("rollout", "saved", names=["gen"]) == {} and it.service.state.counts.accepted == 4
    it.check()


def test_fields_count_after_the_rows_that_they_belong_to():
    it = Scene(late=("rollout", "reference"))
    it.generate()
    it.learn("reference", "ref")
    it.learn("actor_fwd", "old")
    it.ask("reference", "saved", names=["ref"])
    assert it.told() == ["admitted"], "the rows themselves are not accepted yet"
    it.ask("rollout", "saved", names=["gen"])
    assert it.told() == ["accepted", "ref_logprobs", "old_logprobs"]
    it.check()


@pytest.mark.parametrize("noticed", [True, False])
def test_prompt_groups_that_only_their_maker_had_are_generated_again(noticed):
    it = Scene(late=("rollout",))
    it.generate()
    held = it.ask("reference", "claim", task="reference", **WINDOW)
    it.told()
    if noticed:
        it.ask("supervisor", "down", 1, group="rollout", incarnation=1)
    else:
        it.ask("rollout", "next_version", 2, after=str(V0))
    assert (
        it.told() == ["dropped"]
        and it.service.state.counts.dropped == {"lost": 4}
        and it.service.state.counts.accepted == 0
    )
    assert (
        list(it.service.state.tickets.reissued) == [0, 1] and it.service.state.shards.garbage == []
    )
    assert it.put(
        "reference", "ref", held["tickets"], held["lease"], fields=GIVES["reference"]
    ) == {
        0: "lease_lost",
        1: "lease_lost",
    }
    assert it.service.state.shards.garbage == ["ref", "gen"], "the lease has ended"
    assert it.generate("again", incarnation=2) == [0, 1]
    it.ask("rollout", "saved", 2, names=["again"])
    assert it.service.state.counts.accepted == 4
    it.check()


def test_saved_rows_stay_when_their_maker_dies():
    it = Scene(late=("rollout",))
    it.generate()
    it.ask("rollout", "saved", names=["gen"])
    it.ask("supervisor", "down", 1, group="rollout", incarnation=1)
    assert it.service.state.counts.dropped == {} and it.ask(
        "reference", "claim", task="reference", **WINDOW
    )
    it.check()


def test_a_task_gives_again_the_fields_that_were_lost():
    it = Scene(late=("reference",))
    it.generate()
    it.learn_all()
    assert it.ask("actor", "claim", task="actor", **WINDOW)["tickets"] == [0, 1]
    it.told()
    it.ask("supervisor", "down", 1, group="reference", incarnation=1)
    assert it.told() == ["lost"] and it.service.state.counts.dropped == {}
    with_ref = it.service.state.bits.mask(("ref_logprobs",))
    assert not any(group.has(with_ref) for group in it.service.state.groups.values())
    assert it.ask("actor_fwd", "claim", task="actor_fwd", **WINDOW) is None, (
        "the others have given theirs"
    )
    it.learn("reference", "again", incarnation=2)
    it.ask("reference", "saved", 2, names=["again"])
    assert it.told() == ["ref_logprobs"] and it.ask("actor", "trained", step=0, leases=[4]) == {
        "staleness": [0, 0],
        "lag": 0,
        "save_next": False,
    }
    it.check()


def test_fields_that_were_given_again_are_not_those_that_were_claimed():
    """Who has read the former ones, or cannot read them, claims anew."""
    it = Scene(late=("reference",))
    it.generate()
    it.learn_all()
    lease = it.ask("actor", "claim", task="actor", **WINDOW)["lease"]
    it.ask("supervisor", "down", 1, group="reference", incarnation=1)
    assert it.ask("actor", "settled", leases=[lease]) == {"tickets": []}, (
        "nobody need wait for what is lost"
    )
    it.learn("reference", "again", incarnation=2)
    it.ask("reference", "saved", 2, names=["again"])
    assert it.ask("actor", "settled", leases=[lease]) == {"tickets": []}
    it.service.restart()
    assert it.ask("actor", "settled", leases=[lease]) == {"tickets": []}
    it.ask("actor", "release", lease=lease)
    lease = it.ask("actor", "claim", task="actor", **WINDOW)["lease"]
    assert it.ask("actor", "settled", leases=[lease]) == {"tickets": [0, 1]}
    it.check()


def test_what_others_lose_is_nothing_to_a_task_that_does_not_need_it():
    """It neither reads their shards, nor waits for what nobody will save."""
    it = Scene(late=("reference",))
    it.generate()
    it.learn("reference", "ref")
    claim = it.ask("actor_fwd", "claim", task="actor_fwd", **WINDOW)
    assert [shard["name"] for shard in claim["shards"]] == ["gen"]
    it.ask("supervisor", "down", 1, group="reference", incarnation=1)
    it.learn("reference", "again", incarnation=2)
    it.ask("reference", "saved", 2, names=["again"])
    assert it.ask("actor_fwd", "settled", leases=[claim["lease"]]) == {"tickets": [0, 1]}
    it.check()


def test_a_claim_is_not_ready_while_fields_are_lost():
    it = Scene(late=("reference",))
    it.generate()
    it.learn_all()
    it.ask("supervisor", "down", 1, group="reference", incarnation=1)
    assert it.ask("actor", "claim", task="actor", **WINDOW) is None
    it.learn("reference", "again", incarnation=2)
    assert it.ask("actor", "claim", task="actor", **WINDOW)["tickets"] == [0, 1]
    it.check()


@pytest.mark.parametrize("late", ["rollout", "reference"])
def test_a_step_is_trained_when_all_its_rows_are_saved(late):
    it = Scene(late=(late,))
    it.generate()
    it.learn_all()
    lease = it.ask("actor", "claim", task="actor", **WINDOW)["lease"]
    for op, args in (("settled", {}), ("trained", {"step": 0})):
        assert it.ask("actor", op, leases=[lease], **args) is None
    it.service.restart()
    assert it.ask("actor", "trained", step=0, leases=[lease]) is None
    it.ask(late, "saved", names=["gen" if late == "rollout" else "ref"])
    assert it.ask("actor", "settled", leases=[lease]) == {"tickets": [0, 1]}
    for _ in range(2):
        assert it.ask("actor", "trained", step=0, leases=[lease])["staleness"] == [0, 0]
    it.check()


def test_an_actor_learns_before_it_trains_that_rows_were_lost():
    it = Scene(late=("rollout",))
    it.generate()
    it.learn_all()
    lease = it.ask("actor", "claim", task="actor", **WINDOW)["lease"]
    it.ask("supervisor", "down", 1, group="rollout", incarnation=1)
    assert it.ask("actor", "settled", leases=[lease]) == {"tickets": []}
    assert refused_kind(it.service, "actor", 1, "t", "trained", step=0, leases=[lease]) == "refused"
    it.ask("actor", "release", lease=lease)
    it.late = ()
    it.generate("again", incarnation=2)
    it.learn_all()
    lease = it.ask("actor", "claim", task="actor", **WINDOW)["lease"]
    assert it.ask("actor", "trained", step=0, leases=[lease])
    it.check()


def test_nobody_but_the_maker_says_that_rows_are_saved():
    it = Scene(late=("rollout",))
    it.generate()
    assert refused_kind(it.service, "actor", 1, "k", "saved", names=["gen"]) == "refused"
    it.ask("supervisor", "down", 1, group="rollout", incarnation=1)
    assert refused_kind(it.service, "rollout", 1, "k", "saved", names=["gen"]) == "fenced"
    assert it.service.state.counts.accepted == 0


def test_the_file_of_a_shard_that_was_dropped_meanwhile_is_removed():
    it = Scene(late=("rollout",), staleness=1)
    it.generate()
    it.ask("actor", "resume", 2, step=0)
    it.ask("actor", "publish", 2, version="i000002-v000000", digest="d")
    assert it.service.state.counts.dropped == {}, "version 0 survives a resume at step 0"
    it.ask("actor", "checkpoint", 2, step=0, name="c", digest="d")
    assert it.service.state.shards.garbage == []
    it.ask(
        "rollout",
        "saved",
        names=["gen", "rollout-i000001-unheard-of", "actor-i000001-of-others", "rollout-i000002-1"],
    )
    assert it.service.state.shards.garbage == ["rollout-i000001-unheard-of"]


def test_a_client_hears_which_of_the_shards_that_it_holds_are_free():
    it = Scene()
    it.generate()
    assert it.ask("rollout", "beat", member="r", holds=["gen", "gone", "other"])["free"] == [
        "gone",
        "other",
    ]
    assert it.ask("rollout", "beat", member="r")["free"] == []
    assert "holds" not in it.service.beats.latest["rollout/r"]


def test_a_name_of_a_shard_is_used_once():
    it = Scene()
    it.generate()
    put = {"shard": {"name": "gen"}, "rows": [], "fields": list(GENERATED)}
    assert refused_kind(it.service, "rollout", 1, "new", "put", **put) == "refused"
    assert it.service.state.shards.garbage == [], "what others still read stays"


def test_acceptance_is_journaled_by_a_live_controller(tmp_path):
    run, config = make_run(tmp_path / "run"), small()
    with in_thread(run, config), QueueClient(run, config, "rollout", 1) as rollout:
        with QueueClient(run, config, "actor", 1) as actor:
            actor.connection.call("resume", step=0)
            actor.connection.call("publish", version=str(V0), digest="d")
        rollout.connection.call("serve", reader="r", version=str(V0))
        tickets = rollout.connection.call("admit", reader="r", count=2)["tickets"]
        rows = [
            {
                "ticket": t,
                "episodes": b"\1\1",
                "lengths": pack_lengths([5, 5]),
                "versions": [V0.encode()],
            }
            for t in tickets
        ]
        put = {"shard": {"name": "s"}, "rows": rows, "fields": list(GENERATED)}
        assert rollout.connection.call("put", **put, saved=False) == {"refused": {}}
        rollout.connection.call("saved", names=["s"])
    with in_thread(run, config) as successor:
        assert successor.state.counts.accepted == 4 and successor.state.shards.unsaved == {}
    assert run.events.read_text().count('"accepted"') == 4
