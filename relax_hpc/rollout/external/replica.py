"""A replica whose engine another program started: from its join to its loss."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from relax_hpc.base.metrics.writer import METRICS_FILE
from relax_hpc.base.terminal_text import log_entry
from relax_hpc.base.versions import Version
from relax_hpc.data.generation import GenerateRequest, Generation
from relax_hpc.queue.client.answers import PublishedVersion
from relax_hpc.rollout.engines.engine import (
    BadAnswer,
    Engine,
    EngineFault,
    PromptScorer,
    PromptScores,
)
from relax_hpc.rollout.engines.pool import EngineId
from relax_hpc.rollout.episodes.play import EngineRetry
from relax_hpc.rollout.external.engine import WEIGHT_SYNCING, ExternalAddress, RemoteEngine
from relax_hpc.rollout.external.preflight import (
    JoinRefused,
    check_scores,
    compare_scores,
    probe_prompts,
)
from relax_hpc.rollout.external.shared_versions import SharedVersions
from relax_hpc.rollout.replica import Replica
from relax_hpc.training.weights.node_cache import StagedFolder
from relax_hpc.training.weights.subscriber import NOTHING

if TYPE_CHECKING:
    from relax_hpc.rollout.rollout_rank import Rollout

_PARITY = "parity/logprob_abs_diff"
_MAX_PROBE_TOKENS = 256
_PROBES = 4
"""Prompts of the run by which log-probabilities are compared."""
_MAX_BAD_ANSWERS = 3
"""Unusable responses in a row after which the engine leaves. One may be due to its prompt; another
engine decides then."""
_POLL_S = 0.1
"""Seconds between two looks at the versions of other engines."""
_TAIL_BYTES = 64 << 10
"""Bytes at the end of metrics.jsonl that are searched for the parity metric."""
ReportPhase = Callable[[str], None]


class ExternalReplica(Replica):
    """A replica with an `RemoteEngine`. All faults of the engine end in `lose`: its work is
    handed over, and `serve` returns."""

    def __init__(
        self,
        rollout: Rollout,
        address: ExternalAddress,
        shared: SharedVersions,
        report_phase: ReportPhase,
    ) -> None:
        """``report_phase``: called with each phase of the join, and with an empty text once the
        engine serves."""
        self.address, self._shared, self._report_phase = address, shared, report_phase
        super().__init__(rollout, EngineId(address.number, 0))
        # Evaluations are of the run's own engines.
        self.reader.evaluates = False
        self.loss: EngineFault | JoinRefused | None = None
        """Reason why the engine left by itself; None: it serves, or it was asked to leave."""
        self.active_since = 0.0
        """Time of its first version on the monotonic clock, in seconds; 0: it has none yet."""
        self._bad_answers = 0
        self._bad_samples = Counter[tuple[str, int]]()
        """Unusable responses in a row for each sample of a prompt."""

    def rotate_log(self) -> None:
        """Do nothing: the program that started the engine writes its log."""

    def new_engine(self) -> Engine:
        """Engine that serves no version of the run yet."""
        context = self.context
        return RemoteEngine(self.config, self.address, context.model, NOTHING, self._shared)

    async def serve(self) -> None:
        """Join and serve until the run is finished, the engine is lost, or it is asked to leave.
        Only faults of the queue are raised."""
        try:
            await super().serve()
        except (EngineFault, JoinRefused) as error:
            # Of the start, before any task of the replica.
            self.lose(error)

    def lose(self, error: EngineFault | JoinRefused) -> None:
        """Let the engine leave because of ``error``. Other engines continue its work."""
        if not self.loss and not self.leaving.is_set():
            self.loss = error
        self.leaving.set()

    async def start(self) -> None:
        """Connect to the engine and compare it with the run, see `RemoteEngine.start`."""
        assert isinstance(self.engine, RemoteEngine)
        self.engine.taken_seeds = self._taken_seeds()
        reporting = asyncio.create_task(self._report_phases_of(self.engine))
        try:
            await self.engine.start()
        finally:
            reporting.cancel()

    async def _report_phases_of(self, engine: RemoteEngine) -> None:
        reported = ""
        while True:
            if engine.phase != reported:
                reported = engine.phase
                self._report_phase(reported)
            await asyncio.sleep(_POLL_S)

    def _taken_seeds(self) -> frozenset[int]:
        """Seeds of all other engines of the run that this process knows."""
        first, count = self.config.seed, self.config.rollout.replicas
        seeds = set(range(first, first + count))
        for replica in self.rollout.replicas:
            if isinstance(replica.engine, RemoteEngine) and replica is not self:
                seeds.update(seed for seed in [replica.engine.seed] if isinstance(seed, int))
        return frozenset(seeds)

    async def watch(self) -> None:
        """Let the engine leave when it does not answer heartbeats any more."""
        assert isinstance(self.engine, RemoteEngine)
        description = await self.engine.wait_dead()
        self.lose(EngineFault(self.engine.loss_reason, description))

    async def replace_engine(self, fault: EngineFault) -> None:
        """Let the engine leave: its weights are unknown, and it cannot be replaced."""
        self.ready.clear()
        await self.report_fault(fault)
        self.lose(fault)

    async def handle_fault(self, fault: EngineFault, engine: Engine, counts_failure: bool) -> None:
        """Count a fault, and let the engine leave. A response that cannot be used is a fault of the
        engine here, so that it does not count against the run's prompts."""
        if self.leaving.is_set():
            return
        if isinstance(fault, BadAnswer):
            self._bad_answers += 1
            await self.report_fault(fault)
            if self._bad_answers < _MAX_BAD_ANSWERS:
                return
        elif counts_failure:
            await self.report_fault(fault)
        self.lose(fault)

    async def ask_once(
        self, request: GenerateRequest, counts_failure: bool = True
    ) -> Generation | BadAnswer:
        """As `Replica.ask_once`, but each BadAnswer is raised as EngineRetry."""
        answer = await super().ask_once(request, counts_failure)
        sample = request.prompt_id, request.sample
        if isinstance(answer, BadAnswer):
            self._bad_samples[sample] += 1
            await self.handle_fault(answer, self.engine, counts_failure)
            if self._bad_samples[sample] >= _MAX_BAD_ANSWERS:
                # Usable responses to other prompts in between must not keep its ticket here.
                self.lose(answer)
            raise EngineRetry from answer
        self._bad_answers = 0
        self._bad_samples.pop(sample, None)
        return answer

    async def load_version(self, announced: PublishedVersion) -> None:
        """Fetch an announced version and serve it. Before the first one is served, the engine is
        compared with another engine of the same version."""
        if not self.active_since:
            self._report_phase(WEIGHT_SYNCING)
        with self.activity("weights", Version.parse(announced.version).number):
            fetched = await asyncio.to_thread(self.reader.fetch, announced)
        if fetched is None:
            return
        manifest, staged = fetched
        version = Version.parse(manifest.version)
        loading = await self.until_leaving(self._load(version, staged))
        if loading.cancelled():
            return
        loading.result()
        if not self.active_since:
            comparing = await self.until_leaving(self._compare(version))
            if comparing.cancelled():
                return
            try:
                is_compared = comparing.result()
            except JoinRefused as error:
                self.lose(error)
                return
            if not is_compared:
                # `newer` then asks for a version above this one, which is compared instead.
                self.reader.serving = version
                return
        self.ready.set()
        await asyncio.to_thread(self.reader.served, version)
        if not self.active_since:
            self.active_since = time.monotonic()
            self._report_phase("")

    async def _load(self, version: Version, staged: StagedFolder) -> None:
        try:
            with self.activity("engine_update", version.number):
                await self.engine.update_weights(staged.path, version)
        finally:
            staged.release()
        self.context.report(version.number, {"perf/engine_pause_s": self.engine.pause_s})

    async def _compare(self, version: Version) -> bool:
        """Compare log-probabilities with another engine that serves ``version``. False: the other
        engines serve a newer version. JoinRefused: they differ, or no engine can be compared."""
        limit_s = self.config.rollout.external.compare_timeout_s
        prompts = await asyncio.to_thread(self._probe_prompts)
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            peers = self._peers()
            for peer in peers:
                if peer.reader.serving == version and prompts:
                    reference = await self._reference(peer, prompts)
                    if reference and reference.version == version:
                        await self._check_scores(prompts, reference, peer)
                        return True
            if peers and min(peer.reader.serving for peer in peers) > version:
                return False
            await asyncio.sleep(_POLL_S)
        raise JoinRefused(
            "no_reference",
            f"no engine of the run served {version} within {limit_s:g} s, with which its "
            "log-probabilities could be compared; try again (rollout.external.compare_timeout_s)",
        )

    def _peers(self) -> list[Replica]:
        """Other engines that serve and can score prompts, the run's own first."""
        peers = []
        for replica in self.rollout.replicas:
            is_serving = replica.ready.is_set() and replica.reader.serving != NOTHING
            if replica is not self and is_serving and isinstance(replica.engine, PromptScorer):
                peers.append(replica)
        return sorted(peers, key=lambda peer: peer.number)

    def _probe_prompts(self) -> list[list[int]]:
        prompts = self.rollout.train_prompts
        count = min(_PROBES, len(prompts))
        # An engine takes rows of this length, and one more token.
        longest_row = self.config.data.max_prompt_tokens + self.config.rollout.max_new_tokens
        return probe_prompts(
            [prompts[index].token_ids for index in range(count)],
            min(_MAX_PROBE_TOKENS, longest_row - 1),
        )

    async def _reference(self, peer: Replica, prompts: list[list[int]]) -> PromptScores | None:
        """Scores of ``prompts`` by another engine; None: it has failed."""
        assert isinstance(peer.engine, PromptScorer)
        try:
            return await peer.engine.score(prompts)
        except EngineFault as fault:
            print(log_entry(f"engine {peer.number} did not score prompts: {fault}"), flush=True)
            return None

    async def _check_scores(
        self, prompts: list[list[int]], reference: PromptScores, peer: Replica
    ) -> None:
        assert isinstance(self.engine, RemoteEngine)
        scores = await self.engine.score(prompts)
        if scores.version != reference.version:
            raise JoinRefused(
                "wrong_version", f"it reports {scores.version} instead of {reference.version}"
            )
        difference = compare_scores(scores, reference)
        parity = await asyncio.to_thread(newest_parity, self.context.run.root)
        print(
            f"external engine {self.number}: log-probabilities differ by {difference:.3g} nats a "
            f"token from engine {peer.number} (parity of the run: {parity:.3g})",
            flush=True,
        )
        dtype = self.config.rollout.engine.dtype or self.config.model.dtype
        check_scores(difference, parity, dtype)


def newest_parity(run_dir: Path) -> float:
    """The newest parity/logprob_abs_diff in the run's metrics, in nats; 0: it has no value yet."""
    try:
        with (run_dir / METRICS_FILE).open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return 0.0
    for line in reversed(lines):
        try:
            value = json.loads(line).get(_PARITY)
        except (ValueError, AttributeError):
            continue
        if isinstance(value, float):
            return value
    return 0.0
