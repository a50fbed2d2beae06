"""The leader of actor_fwd: which claims it scores, and with which weights."""

from __future__ import annotations

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np

from relax_hpc.base.metrics.spans import OpenSpan
from relax_hpc.base.versions import Version
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.client import Claim
from relax_hpc.queue.storage.shard_store import PlaneCounts
from relax_hpc.roles import forward
from relax_hpc.training.weights.subscriber import NOTHING, PublishedVersion

SPAN = OpenSpan("wait", None, "", ("", ""), 0.0, 0.0)


def done(value) -> Future:
    future: Future = Future()
    future.set_result(value)
    return future


class Reader:
    """A subscriber to whom one version after the other is announced; the last but one is gone when
    it is read."""

    def __init__(self, *_, **__) -> None:
        self.serving = NOTHING
        self.fetcher = SimpleNamespace(relay_folders=lambda _: ["here"])
        self.news = iter([done(PublishedVersion(version="i000001-v000001", digest="old"))])

    def newer(self) -> Future:
        return next(self.news, Future())

    def fetch(self, announced):
        return PublishedVersion(version="i000002-v000000", digest="new"), "staged"

    def served(self, version: Version) -> None:
        self.serving = version


class Queue:
    """A client whose first claim is of step 1, from before the actor resumed at step 0; the second
    comes twice."""

    def __init__(self) -> None:
        claims = [
            Claim(lease, step, (2 * step,), (), step) for lease, step in ((7, 1), (8, 0), (8, 0))
        ]
        self.claims = iter([*claims, None])
        self.given_back: list[int] = []
        self.put_rows: list[tuple[int, int]] = []

    def submit_claim(self, task: str, budget: int) -> Future:
        return done(next(self.claims))

    def return_claim(self, claim: Claim) -> None:
        self.given_back.append(claim.lease)

    def put(self, rows, fields, claim) -> None:
        self.put_rows += [(claim.lease, row["old_logprob_version"]) for row in rows]


def test_a_claim_from_before_a_rollback_is_given_back_and_training_goes_on(monkeypatch):
    """Version 1 of the new actor comes only after step 0 was trained again, which needs these
    scores."""
    monkeypatch.setattr(forward, "Subscriber", Reader)
    client, told = Queue(), []
    rows, reader = (
        [{"row_id": "000000000.00.00"}],
        SimpleNamespace(plane_counts=PlaneCounts(), planes=[]),
    )
    # The first time that they are read, their maker has just died.
    found = {8: iter([None, rows])}
    rows_of = {"rows": lambda claim, channel: next(found[claim.lease])}
    ranks = SimpleNamespace(
        size=2, tell=told.append, control=RankChannel(10.0), reader=reader, **rows_of
    )
    context = SimpleNamespace(
        client=client,
        role="actor_fwd",
        run=None,
        group="g",
        config=Config(),
        spans=lambda *_, **__: nullcontext(SPAN),
        report=print,
    )
    parallel = SimpleNamespace(pack_tokens=9, parallel=SimpleNamespace(data=1))
    about = {"forward": parallel, "placeholders": {}, "routes": None}
    profiler = SimpleNamespace(reach=lambda step: None, close=lambda: None)
    scorer = SimpleNamespace(
        **about,
        profiler=profiler,
        load=lambda data: None,
        score=lambda rows: [np.zeros(1, np.float32)],
    )
    forward._lead(context, ranks, scorer, every=1)
    assert client.given_back == [7]
    assert client.put_rows == [(8, Version(2, 0).encode())]
    news = asdict(PublishedVersion(version="i000002-v000000", digest="new"))
    assert told[0] == {"do": "load", "news": news, "relays": ["here"]}, (
        "what the leader read, and passes on"
    )
    assert [message["do"] for message in told] == ["load", "score", "score", "end"]


class Refreshed:
    """A reference's subscriber; it pulls what is asked of it."""

    def __init__(self, *arguments, relays: bool) -> None:
        assert not relays, "it would keep a version in memory until its next one"
        self.every = arguments[-1]
        self.serving, self.told = NOTHING, iter(())
        self.fetcher = SimpleNamespace(forget_before=lambda version: None)

    def newer(self) -> Future:
        return next(self.told, Future())

    def fetch(self, announced):
        return announced, "staged"


def test_a_reference_takes_the_policy_once_in_so_many_steps(monkeypatch):
    monkeypatch.setattr(forward, "Subscriber", Refreshed)
    ranks, loaded = SimpleNamespace(size=1, reader=SimpleNamespace(planes=[])), []
    context = SimpleNamespace(
        client=object(),
        role="reference",
        run=None,
        group="g",
        config=Config(),
        spans=lambda *_, **__: nullcontext(SPAN),
    )
    weights = forward._Weights(context, ranks, SimpleNamespace(load=loaded.append), every=10)
    assert weights.reader.every == 10, "it is told of multiples alone"
    assert weights.fit(Claim(1, 9, (), (), 9)) and not weights.fit(Claim(1, 10, (), (), 10))
    weights.reader.told = iter(
        [done(PublishedVersion(version=str(Version(1, number)), digest="d")) for number in (10, 30)]
    )
    weights.news = weights.reader.newer()
    weights.pull()
    assert weights.reader.serving == Version(1, 10) and loaded == ["staged"]
    assert weights.fit(Claim(1, 19, (), (), 19)) and not weights.fit(Claim(1, 20, (), (), 20))
    weights.pull()
    assert weights.fit(Claim(1, 39, (), (), 39)) and not weights.fit(Claim(1, 40, (), (), 40))
