"""Requests about versions of the weights: the actor publishes them, readers ask for them, and say
which they serve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.controller.messages import Refused, Request, check_size
from relax_hpc.queue.controller.registry import handles
from relax_hpc.queue.controller.topics import NEWS
from relax_hpc.queue.controller.waiting import NotYet

if TYPE_CHECKING:
    from relax_hpc.queue.controller.service import QueueService
    from relax_hpc.queue.controller.state.weights import Weights


@handles("publish")
def publish(service: QueueService, request: Request, version: str, digest: str) -> Any:
    """Publish a version, whose manifest has this ``digest``; the versions that have to be kept."""
    found, weights = _of_its_own(request, version), service.state.weights
    if found not in weights.published:
        service.record(op="publish", version=version, digest=digest)
    if retire := [str(old) for old in weights.retirable(service.plan.refresh_every)]:
        service.record(op="retire", versions=retire)
    return {"keep": [str(kept) for kept in weights.published]}


@handles("filed")
def filed(service: QueueService, request: Request, version: str, digest: str) -> Any:
    """Note that the files of ``version`` are written."""
    found, weights = _of_its_own(request, version), service.state.weights
    if found in weights.published and found not in weights.filed:
        service.record(op="filed", version=version, digest=digest)
    return {}


def _of_its_own(request: Request, version: str) -> Version:
    found = Version.parse(version)
    if found.incarnation != request.owner[1]:
        raise Refused(
            "fenced",
            f"{request.op}: version {version} is not of actor incarnation {request.owner[1]}",
        )
    return found


@handles("next_version")
def next_version(
    service: QueueService, request: Request, after: str, multiple_of: int = 1, evaluator: str = ""
) -> Any:
    """The newest published version whose number is a multiple, once it is above ``after``; before
    that, that the reader ``evaluator`` owes an evaluation of what it serves: who owed it may have
    left.

    Who takes turns with the actor is not told: it may have made room by now, and evaluates what it
    loads next."""
    weights = service.state.weights
    if evaluator and not service.plan.colocated and _owes_evaluation(service, evaluator):
        return {"evaluate": True}
    if newest := weights.newer(Version.parse(after), multiple_of):
        return _news(weights, newest)
    if service.state.progress.finished():
        return {"finished": True}
    raise NotYet(NEWS)


@handles("filed_version")
def filed_version(service: QueueService, request: Request, after: str, multiple_of: int = 1) -> Any:
    """The newest published version above ``after`` that has files; {} if there is none."""
    weights = service.state.weights
    newest = weights.newest_filed(multiple_of)
    return _news(weights, newest) if newest is not None and newest > Version.parse(after) else {}


@handles("relays")
def relays(service: QueueService, request: Request, reader: str, version: str, where: dict) -> Any:
    """``reader`` begins to pull ``version``, and passes it on as ``where`` says: from whom it takes
    it, the best first.

    Behind them all is the maker, and of a version that is none any more there is nobody else."""
    check_size("relays", where)
    found, weights = Version.parse(version), service.state.weights
    service.relays.keep(weights.published)
    if found not in weights.published or found not in service.state.lineage:
        return {"sources": []}
    is_over = service.state.members.lowest_allowed
    return {"sources": service.relays.join(found, reader, request.owner, where, is_over)}


def _news(weights: Weights, version: Version) -> dict[str, str]:
    files = weights.filed.get(version, "")
    return {"version": str(version), "digest": weights.published[version], "files": files}


@handles("serve")
def serve(
    service: QueueService, request: Request, reader: str, version: str, evaluates: bool = False
) -> Any:
    """``reader`` has loaded ``version``; whether it, who ``evaluates``, owes an evaluation of
    it."""
    Version.parse(version)
    service.record(op="serve", reader=reader, owner=request.owner, version=version)
    return {"eval_due": evaluates and _owes_evaluation(service, reader)}


def _owes_evaluation(service: QueueService, reader: str) -> bool:
    """Whether what ``reader`` serves is to be evaluated, and by it: one reader at a time, for as
    long as it serves what is due. Who cannot load a later version has had its turn."""
    state = service.state
    serving = {
        name: found.number
        for name, (_, found) in state.weights.readers.items()
        if found in state.lineage
    }
    due = {
        name
        for name, number in serving.items()
        if service.plan.eval_due(state.progress.evaluated, number)
    }
    if reader in due and state.weights.evaluator not in due:
        service.record(op="evaluate", reader=reader)
    return reader in due and state.weights.evaluator == reader


@handles("evaluated")
def evaluated(
    service: QueueService, request: Request, version: int, values: dict[str, float]
) -> Any:
    """Counts once, if the asking group still serves that number in the lineage: it may be rolled
    back by now."""
    state = service.state
    served = [found for owner, found in state.weights.readers.values() if owner == request.owner]
    first = version > state.progress.evaluated
    if first and any(found.number == version and found in state.lineage for found in served):
        service.record(op="evaluated", version=version)
        service.on_report("eval", version, values, {})
    return {}
