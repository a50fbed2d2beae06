"""Requests about versions of the weights: the actor publishes them, and readers ask for them and
report which they serve."""

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
    """Publish a version, whose manifest has this ``digest``; the versions that must be kept."""
    parsed, weights = _own_version(request, version), service.state.weights
    if parsed not in weights.published:
        service.record(op="publish", version=version, digest=digest)
    retired = [str(old) for old in weights.retirable(service.plan.refresh_every)]
    if retired:
        service.record(op="retire", versions=retired)
    return {"keep": [str(kept) for kept in weights.published]}


@handles("filed")
def filed(service: QueueService, request: Request, version: str, digest: str) -> Any:
    """Record that the files of ``version`` are written."""
    parsed, weights = _own_version(request, version), service.state.weights
    if parsed in weights.published and parsed not in weights.filed:
        service.record(op="filed", version=version, digest=digest)
    return {}


def _own_version(request: Request, version: str) -> Version:
    """The parsed version. Refused: it is not of the incarnation that sent the request."""
    parsed = Version.parse(version)
    if parsed.incarnation != request.owner[1]:
        raise Refused(
            "fenced",
            f"{request.op}: version {version} is not of actor incarnation {request.owner[1]}",
        )
    return parsed


@handles("next_version")
def next_version(
    service: QueueService, request: Request, after: str, multiple_of: int = 1, evaluator: str = ""
) -> Any:
    """The newest published version whose number is a multiple, when it is above ``after``.

    Before that, the reader ``evaluator`` may be asked to evaluate the version that it serves, for
    example because the reader that had to do it has ended. A reader that takes turns with the actor
    is not asked: it may have freed the devices, and evaluates the version that it loads next.
    """
    weights = service.state.weights
    if evaluator and not service.plan.colocated and _has_to_evaluate(service, evaluator):
        return {"evaluate": True}
    newest = weights.newer(Version.parse(after), multiple_of)
    if newest:
        return _describe_version(weights, newest)
    if service.state.progress.finished():
        return {"finished": True}
    raise NotYet(NEWS)


@handles("filed_version")
def filed_version(service: QueueService, request: Request, after: str, multiple_of: int = 1) -> Any:
    """The newest version on disk above ``after``; {}: there is no such version."""
    weights = service.state.weights
    newest = weights.newest_filed(multiple_of)
    if newest is None or newest <= Version.parse(after):
        return {}
    return _describe_version(weights, newest)


@handles("relays")
def relays(service: QueueService, request: Request, reader: str, version: str, where: dict) -> Any:
    """``reader`` begins to pull ``version``, and forwards it at ``where``; the readers from which
    it can pull, the best first.

    The producer is the last resort. It is the only source of a version that is not published any
    more.
    """
    check_size("relays", where)
    parsed, weights = Version.parse(version), service.state.weights
    service.relays.keep(weights.published)
    if parsed not in weights.published or parsed not in service.state.lineage:
        return {"sources": []}
    is_over = service.state.members.lowest_allowed
    return {"sources": service.relays.join(parsed, reader, request.owner, where, is_over)}


def _describe_version(weights: Weights, version: Version) -> dict[str, str]:
    files = weights.filed.get(version, "")
    return {"version": str(version), "digest": weights.published[version], "files": files}


@handles("serve")
def serve(
    service: QueueService, request: Request, reader: str, version: str, evaluates: bool = False
) -> Any:
    """``reader`` has loaded ``version``; whether it has to evaluate it, if it ``evaluates``."""
    Version.parse(version)
    service.record(op="serve", reader=reader, owner=request.owner, version=version)
    return {"eval_due": evaluates and _has_to_evaluate(service, reader)}


def _has_to_evaluate(service: QueueService, reader: str) -> bool:
    """Whether ``reader`` has to evaluate the version that it serves. One reader does it at a time,
    as long as it serves a version that is due. So a reader that cannot load a later version does
    not evaluate for ever."""
    state = service.state
    due = set()
    for name, (_, version) in state.weights.readers.items():
        is_due = service.plan.eval_due(state.progress.evaluated, version.number)
        if version in state.lineage and is_due:
            due.add(name)
    if reader in due and state.weights.evaluator not in due:
        service.record(op="evaluate", reader=reader)
    return reader in due and state.weights.evaluator == reader


@handles("evaluated")
def evaluated(
    service: QueueService, request: Request, version: int, values: dict[str, float]
) -> Any:
    """Report an evaluation. It counts once, if the group still serves a version with this number in
    the lineage: the version may have been rolled back."""
    state = service.state
    served = [parsed for owner, parsed in state.weights.readers.values() if owner == request.owner]
    is_new = version > state.progress.evaluated
    if is_new and any(v.number == version and v in state.lineage for v in served):
        service.record(op="evaluated", version=version)
        service.on_report("eval", version, values, {})
    return {}
