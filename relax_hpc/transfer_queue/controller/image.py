"""A queue's state as plain values and back. What follows from other parts is not written but worked out again."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relax_hpc.transfer_queue.controller.kept import Kept, KeptGroup
from relax_hpc.transfer_queue.controller.media_counts import MediaCounts
from relax_hpc.transfer_queue.controller.reply_cache import Answers
from relax_hpc.transfer_queue.controller.state import QueueState
from relax_hpc.transfer_queue.controller.stock import same
from relax_hpc.transfer_queue.controller.tasks import DONE
from relax_hpc.transfer_queue.controller.tickets import Place, TicketMap, TicketSet
from relax_hpc.transfer_queue.lengths import unpacked
from relax_hpc.transfer_queue.plan import Plan
from relax_hpc.transfer_queue.records import FieldBits, Lease, Owner, PromptGroup, Shard
from relax_hpc.versions import Version

FORMAT = 5
_PLAIN = ("first_place", "next_ticket", "next_lease", "accepted", "trained_steps", "evaluated", "gathered")
_PLAIN += ("incarnations", "ended", "checkpoints", "turn", "rested")

Image = dict[str, Any]


def image_of(state: QueueState) -> Image:
    """Everything that matters of ``state``, msgpack-able; events that were not taken yet are left out."""
    parts = {part: n for n, part in enumerate(dict.fromkeys(part for g in state.groups.values() for part in g.parts))}
    return {name: getattr(state, name) for name in _PLAIN} | {
        "fields": state.bits.names,
        "order": state.order.tobytes(),
        "groups": [
            (
                (ticket, g.owner, g.attempt, g.filtered, g.last, g.place),
                (g.lengths, list(g.versions), g.old_version, [parts[part] for part in g.parts]),
            )
            for ticket, g in state.groups.items()
        ],
        "parts": list(parts),
        "reissued": list(state.reissued),
        "tasks": {name: (q.statuses.dump(), q.position, q.returned) for name, q in state.tasks.items()},
        "leases": [
            (n, held.task, held.owner, held.key, held.tickets, held.shards, held.assignment)
            for n, held in state.leases.items()
        ],
        "shards": [(n, s.descriptor, s.fields, s.owner, s.unsaved) for n, s in state.shards.items()],
        "next_shard": state.shelf.next_number,
        "dropped": dict(state.dropped),
        "noted": dict(state.noted),
        "admissions": state.admissions.clients,
        "puts": state.puts.clients,
        "lineage": state.lineage,
        "published": {str(version): digest for version, digest in state.published.items()},
        "filed": {str(version): digest for version, digest in state.filed.items()},
        "newest": str(state.newest) if state.newest else "",
        "readers": {name: (owner, str(version)) for name, (owner, version) in state.readers.items()},
        "kept": _image_of_kept(state.kept),
        "media": state.media.holders,
    }


def state_of(plan: Plan, image: Image) -> QueueState:
    """The state that ``image`` was made of. LookupError, TypeError or ValueError: it is no image of a queue."""
    state = QueueState(plan)
    for name in _PLAIN:
        setattr(state, name, image[name])
    state.order.frombytes(image["order"])
    state.bits = FieldBits(image["fields"])
    state.reissued = TicketSet(image["reissued"])
    state.dropped, state.noted = Counter(image["dropped"]), Counter(image["noted"])
    state.admissions, state.puts = _answers(image["admissions"]), _answers(image["puts"])
    state.lineage = [(incarnation, step) for incarnation, step in image["lineage"]]
    state.published = {Version.parse(name): digest for name, digest in image["published"].items()}
    state.filed = {Version.parse(name): digest for name, digest in image["filed"].items()}
    state.newest = Version.parse(image["newest"]) if image["newest"] else None
    state.readers = {name: (_owner(owner), Version.parse(v)) for name, (owner, v) in image["readers"].items()}
    state.kept = _kept(image["kept"])
    state.media = MediaCounts.of_holders({holder: tuple(ids) for holder, ids in image["media"].items()})
    _restore_tasks(state, image)
    _restore_rows(state, image)
    return state


def _image_of_kept(kept: Kept) -> Image:
    def plain(groups: dict[int, KeptGroup]) -> Image:
        return {n: (g.source, g.attempt, list(g.versions), g.samples, g.reused) for n, g in groups.items()}

    counts = (kept.next_number, kept.total, kept.used, kept.again, dict(kept.lost))
    return {"groups": plain(kept.groups), "surplus": plain(kept.surplus), "counts": counts}


def _kept(image: Image) -> Kept:
    def groups(found: dict[int, list]) -> dict[int, KeptGroup]:
        return {
            number: KeptGroup(source, attempt, frozenset(versions), {k: tuple(at) for k, at in samples.items()}, reused)
            for number, (source, attempt, versions, samples, reused) in found.items()
        }

    *counts, lost = image["counts"]
    return Kept(groups(image["groups"]), groups(image["surplus"]), *counts, Counter(lost))


def _owner(value: list) -> Owner:
    return value[0], value[1]


def _answers(clients: dict[str, list]) -> Answers:
    return Answers({name: (_owner(owner), answers) for name, (owner, answers) in clients.items()})


def _restore_tasks(state: QueueState, image: Image) -> None:
    for name, (statuses, position, returned) in image["tasks"].items():
        queue = state.tasks[name]
        queue.statuses, queue.position = TicketMap(*statuses), position
        queue.returned = [tuple(window) for window in returned]
    for number, task, owner, key, tickets, shards, assignment in image["leases"]:
        state.leases[number] = Lease(task, _owner(owner), key, tuple(tickets), tuple(shards), assignment)
        state.lease_keys[key] = number


def _restore_rows(state: QueueState, image: Image) -> None:
    shards: dict[int, Shard] = {}
    for number, descriptor, fields, owner, unsaved in image["shards"]:
        shards[number] = Shard(descriptor, tuple(fields), _owner(owner), tuple(unsaved))
    parts = [(number, tuple(fields)) for number, fields in image["parts"]]
    trained = {ticket for (ticket, *_), _ in image["groups"] if state.tasks["actor"].statuses[ticket] == DONE}
    for (ticket, owner, attempt, filtered, last, place), (lengths, versions, old_version, numbers) in image["groups"]:
        width = max(unpacked(lengths, state.plan.samples_per_prompt)) if lengths else 0
        who = _owner(owner) if owner else None
        group = PromptGroup(who, attempt, filtered, width, lengths, same(tuple(versions)), old_version)
        group.last, group.place = last, place
        group.parts = tuple(parts[number] for number in numbers)
        state.groups[ticket] = group
        for number, fields in group.parts:
            group.present |= state.bits.of(fields)
            shards[number].needed += 1
            shards[number].untrained += ticket not in trained
    for number, count in state.kept.shards().items():
        shards[number].needed += count
        shards[number].untrained += count
    state.generating = Place(ticket for ticket, group in state.groups.items() if not group.parts)
    state.untrained = Place(state.groups.keys() - trained - set(state.generating))
    for lease in state.leases.values():
        for number in lease.shards:
            shards[number].leases += 1
    for number, shard in shards.items():
        state.shelf.put_back(number, shard)
    state.shelf.next_number = image["next_shard"]
