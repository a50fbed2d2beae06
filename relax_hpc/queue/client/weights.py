"""Requests about weights: published versions, and the version of each reader."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.client.answers import PublishedVersion
from relax_hpc.queue.client.connection import Submit, ignore_answer, then


class WeightRequests:
    """Requests of the actor and of readers about versions. Every method returns a future of the
    answer."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def publish(self, version: Version, digest: str) -> Future[list[str]]:
        """Report that ``version`` can be pulled and its manifest has this digest; the versions that
        a reader may still need."""
        return then(
            self._submit("publish", version=str(version), digest=digest),
            lambda answer: answer["keep"],
        )

    def filed(self, version: Version, digest: str) -> Future[None]:
        """Report that the files of ``version`` are written; ``digest``: of their listing."""
        return then(self._submit("filed", version=str(version), digest=digest), ignore_answer)

    def newer(
        self,
        after: Version,
        multiple_of: int = 1,
        timeout: float | None = None,
        evaluator: str = "",
    ) -> Future[PublishedVersion | None]:
        """The newest version whose number is a multiple, as soon as it is above ``after``; None:
        the run is finished.

        EVALUATION_DUE: the reader ``evaluator`` first has to evaluate the version that it serves.
        """
        return then(
            self._submit(
                "next_version",
                timeout,
                after=str(after),
                multiple_of=multiple_of,
                evaluator=evaluator,
            ),
            PublishedVersion.from_answer,
        )

    def newest_on_disk(
        self, after: Version, multiple_of: int = 1, timeout: float | None = None
    ) -> Future[PublishedVersion | None]:
        """The newest version on disk above ``after`` whose number is a multiple, without waiting;
        None: there is no such version."""
        return then(
            self._submit("filed_version", timeout, after=str(after), multiple_of=multiple_of),
            PublishedVersion.from_answer,
        )

    def relays(
        self, reader: str, version: Version, where: Mapping[str, Any], timeout: float
    ) -> Future[list[dict[str, Any]]]:
        """Report that ``reader`` begins to pull ``version`` and forwards it at ``where``; the same
        descriptions of the readers from which it can pull, the best first. The producer of the
        version is the last resort."""
        return then(
            self._submit("relays", timeout, reader=reader, version=str(version), where=dict(where)),
            lambda answer: answer["sources"],
        )

    def serve(self, reader: str, version: Version, evaluates: bool = False) -> Future[bool]:
        """Report that ``reader`` serves ``version`` from now on; whether it has to evaluate it, if
        it ``evaluates``."""
        return then(
            self._submit("serve", reader=reader, version=str(version), evaluates=evaluates),
            lambda answer: answer["eval_due"],
        )

    def evaluated(self, version: int, values: Mapping[str, float]) -> Future[None]:
        """Report the metrics of the evaluation of version number ``version``."""
        return then(self._submit("evaluated", version=version, values=dict(values)), ignore_answer)
