"""Weights: which versions there are, and who serves which."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any

from relax_hpc.base.versions import Version
from relax_hpc.queue.client.answers import News
from relax_hpc.queue.client.connection import Submit, nothing, then


class Weights:
    """Requests about versions, of the actor and of engines. Every method returns a future with the
    answer."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit

    def publish(self, version: Version, digest: str) -> Future[list[str]]:
        """``version`` can be pulled, its manifest has this digest; the versions that somebody may
        still need."""
        return then(
            self._submit("publish", version=str(version), digest=digest),
            lambda answer: answer["keep"],
        )

    def filed(self, version: Version, digest: str) -> Future[None]:
        """The files of ``version`` are written; ``digest`` is that of their listing."""
        return then(self._submit("filed", version=str(version), digest=digest), nothing)

    def newer(
        self,
        after: Version,
        multiple_of: int = 1,
        timeout: float | None = None,
        evaluator: str = "",
    ) -> Future[News | None]:
        """The newest version whose number is a multiple, once it is above ``after``; None: the run
        is finished.

        OWED: the reader ``evaluator`` is to evaluate what it serves first.
        """
        about = {"multiple_of": multiple_of, "evaluator": evaluator}
        return then(self._submit("next_version", timeout, after=str(after), **about), News.of)

    def newest_on_disk(
        self, after: Version, multiple_of: int = 1, timeout: float | None = None
    ) -> Future[News | None]:
        """The same of those that have files, now; None if there is none above ``after``."""
        return then(
            self._submit("filed_version", timeout, after=str(after), multiple_of=multiple_of),
            News.of,
        )

    def relays(
        self, reader: str, version: Version, where: Mapping[str, Any], timeout: float
    ) -> Future[list[dict[str, Any]]]:
        """``reader`` begins to pull ``version`` and passes on what it has, as ``where`` says; the
        same of those from whom it takes it, the best first. Behind them is the maker."""
        about = {"reader": reader, "version": str(version), "where": dict(where)}
        return then(self._submit("relays", timeout, **about), lambda answer: answer["sources"])

    def serve(self, reader: str, version: Version, evaluates: bool = False) -> Future[bool]:
        """``reader`` works with ``version`` from now on; whether it, who ``evaluates``, owes an
        evaluation."""
        about = {"reader": reader, "version": str(version), "evaluates": evaluates}
        return then(self._submit("serve", **about), lambda answer: answer["eval_due"])

    def evaluated(self, version: int, values: Mapping[str, float]) -> Future[None]:
        """Report the metrics of the evaluation of version number ``version``."""
        return then(self._submit("evaluated", version=version, values=dict(values)), nothing)
