"""A queue's state as plain values and back. What follows from other parts is not written but worked out again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relax_hpc.transfer_queue.answers import Answers
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.records import FieldBits, Lease, Owner, PromptGroup, Shard
from relax_hpc.transfer_queue.state import QueueState
from relax_hpc.transfer_queue.stock import same
from relax_hpc.transfer_queue.tasks import DONE
from relax_hpc.transfer_queue.tickets import Place, TicketMap, TicketSet
from relax_hpc.versions import Version

FORMAT = 1
_PLAIN = ("first_ticket", "next_ticket", "next_lease", "accepted", "trained_steps", "evaluated")
_PLAIN += ("epochs", "ended", "checkpoints")

Image = dict[str, Any]


def image_of(state: QueueState) -> Image:
    """Everything that matters of ``state``, msgpack-able; events that were not taken yet are left out."""
    return {name: getattr(state, name) for name in _PLAIN} | {
        "fields": state.bits.names,
        "groups": [
            (ticket, g.owner, g.attempt, g.width, list(g.versions), g.old_version, [number for number, _ in g.parts])
            for ticket, g in state.groups.items()
        ],
        "reissued": list(state.reissued),
        "tasks": {name: (q.statuses.dump(), q.position, q.returned) for name, q in state.tasks.items()},
        "leases": [(n, held.task, held.owner, held.key, held.tickets, held.shards) for n, held in state.leases.items()],
        "shards": [(n, s.descriptor, s.fields, s.owner, s.unsaved) for n, s in state.shards.items()],
        "next_shard": state.shelf.next_number,
        "dropped": dict(state.dropped),
        "noted": dict(state.noted),
        "admissions": state.admissions.clients,
        "puts": state.puts.clients,
        "lineage": state.lineage,
        "published": {str(version): digest for version, digest in state.published.items()},
        "newest": str(state.newest) if state.newest else "",
        "readers": {name: (owner, str(version)) for name, (owner, version) in state.readers.items()},
    }


def state_of(plan: Plan, image: Image) -> QueueState:
    """The state that ``image`` was made of. LookupError, TypeError or ValueError: it is no image of a queue."""
    state = QueueState(plan)
    for name in _PLAIN:
        setattr(state, name, image[name])
    state.bits = FieldBits(image["fields"])
    state.reissued = TicketSet(image["reissued"])
    state.dropped, state.noted = Counter(image["dropped"]), Counter(image["noted"])
    state.admissions, state.puts = _answers(image["admissions"]), _answers(image["puts"])
    state.lineage = [(epoch, step) for epoch, step in image["lineage"]]
    state.published = {Version.parse(name): digest for name, digest in image["published"].items()}
    state.newest = Version.parse(image["newest"]) if image["newest"] else None
    state.readers = {name: (_owner(owner), Version.parse(v)) for name, (owner, v) in image["readers"].items()}
    _restore_tasks(state, image)
    _restore_rows(state, image)
    return state


def _owner(value: list) -> Owner:
    return value[0], value[1]


def _answers(clients: dict[str, list]) -> Answers:
    return Answers({name: (_owner(owner), answers) for name, (owner, answers) in clients.items()})


def _restore_tasks(state: QueueState, image: Image) -> None:
    for name, (statuses, position, returned) in image["tasks"].items():
        queue = state.tasks[name]
        queue.statuses, queue.position = TicketMap(*statuses), position
        queue.returned = [tuple(window) for window in returned]
    for number, task, owner, key, tickets, shards in image["leases"]:
        state.leases[number] = Lease(task, _owner(owner), key, tuple(tickets), tuple(shards))
        state.lease_keys[key] = number


def _restore_rows(state: QueueState, image: Image) -> None:
    shards: dict[int, Shard] = {}
    for number, descriptor, fields, owner, unsaved in image["shards"]:
        shards[number] = Shard(descriptor, tuple(fields), _owner(owner), tuple(unsaved))
    parts = {number: (number, shard.fields) for number, shard in shards.items()}
    trained = {ticket for ticket, *_ in image["groups"] if state.tasks["actor"].statuses[ticket] == DONE}
    for ticket, owner, attempt, width, versions, old_version, numbers in image["groups"]:
        group = PromptGroup(_owner(owner) if owner else None, attempt, width, same(tuple(versions)), old_version)
        group.parts = tuple(parts[number] for number in numbers)
        state.groups[ticket] = group
        for number, fields in group.parts:
            group.present |= state.bits.of(fields)
            shards[number].needed += 1
            shards[number].untrained += ticket not in trained
    state.generating = Place(ticket for ticket, group in state.groups.items() if not group.parts)
    state.untrained = Place(state.groups.keys() - trained - set(state.generating))
    for lease in state.leases.values():
        for number in lease.shards:
            shards[number].leases += 1
    for number, shard in shards.items():
        state.shelf.put_back(number, shard)
    state.shelf.next_number = image["next_shard"]
