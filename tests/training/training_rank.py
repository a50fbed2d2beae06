"""One rank of a multi-rank training test.

`python -m tests.training.training_rank FILE WORLD RANK [LAYOUT MODEL OUT CHECKPOINT]...`

FILE is the store in which the ranks exchange their addresses, and LAYOUT is the `actor` section of
a configuration as JSON. Rank 0 writes its results to OUT. If CHECKPOINT is not empty, one step is
trained from it. A process tests several layouts, because its start takes most of the time.
"""

from __future__ import annotations

import itertools
import json
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemWriter

from relax_hpc.config.schema import ModelConfig, ParallelConfig
from relax_hpc.net.rendezvous import channel
from relax_hpc.net.rendezvous.channel import RankChannel
from relax_hpc.queue.client import Claim
from relax_hpc.queue.row_schema import Row
from relax_hpc.queue.storage.shard import ShardError
from relax_hpc.roles.inner_forward import InnerRoles
from relax_hpc.roles.ranks import Ranks
from relax_hpc.training import logprobs, parallel, parity
from relax_hpc.training.checkpoint import saver, store
from relax_hpc.training.checkpoint.saver import Saver
from relax_hpc.training.checkpoint.strategy import StagedState
from relax_hpc.training.critic import CriticTrainer
from relax_hpc.training.model import PolicyModel
from relax_hpc.training.models.batches import Batch, idle_batch
from relax_hpc.training.models.hf_files import SafetensorFiles
from relax_hpc.training.trainer import Trainer
from relax_hpc.training.weights.tensors import TensorPart, coverage_error
from tests.helpers import training_helpers as helpers
from tests.training.overlap_checks import check_overlap, unsharded


def main() -> None:
    file, world, rank, *cases = sys.argv[1:]
    torch.set_num_threads(1)
    # Chunks of few tokens. The process of one rank, whose results are compared, has one chunk.
    logprobs.SMALLEST_CHUNK = 2**7
    meeting = dist.FileStore(file, int(world))
    for number in range(0, len(cases), 4):
        run_layout(
            int(world),
            int(rank),
            dist.PrefixStore(f"{number}", meeting),
            *cases[number : number + 4],
        )


def run_layout(
    world: int, rank: int, meeting: dist.Store, layout: str, model: str, out: str, checkpoint: str
) -> None:
    print(f"layout {layout}", flush=True)
    settings = json.loads(layout)
    split = helpers.actor_settings(**settings).parallel
    parallel.initialize(split, rank, world, rank, meeting, "cpu", 0, 60.0)
    trainer = helpers.trainer(Path(model), **settings)
    if checkpoint:
        store.load(Path(checkpoint), trainer, RankChannel(60.0))
        first_step(trainer, Path(out))
    else:
        check_slices(trainer.model, Path(model))
        check_a_slice_of_plain_layers(trainer.model, split)
        check_waits_for_the_leader()
        check_rows_that_one_rank_cannot_read()
        check_metrics_of_few_ranks(trainer)
        check(trainer, Path(out))
        if split.data > 1 and split.context == 1:
            check_overlap(Path(model), settings, Path(out))
            if world == 2 and split.expert == 1:
                check_overlap(Path(model), unsharded(settings), Path(out))
        check_critic(helpers.critic(Path(model), **settings), Path(out))
        metrics = helpers.learned_from_files(helpers.trainer(Path(model), **settings))
        if rank == 0:
            (Path(out) / "from-files.json").write_text(json.dumps(metrics))
        check_distillation(helpers.distiller(Path(model), **settings), Path(out))
    parallel.destroy()


def first_step(trainer: Trainer, out: Path) -> dict[str, float]:
    """Train a step and write its weights to OUT/first.safetensors. Return its metrics."""
    samples, split = helpers.rows(4, seed=9), trainer.model.pack_split
    # Other replicas have no row in the first step, but take part in it.
    has_rows = trainer.model.layout.data_rank == 0
    batch = helpers.batch(samples, split) if has_rows else idle_batch(samples[0], "cpu", split)
    trainer.accumulate([batch])
    metrics = trainer.step(helpers.LR)
    weights = trainer.model.export_hf()
    if weights is not None:
        save_file(weights, out / "first.safetensors")
    return metrics


def check_critic(trainer: CriticTrainer, out: Path) -> None:
    """Train two steps with a checkpoint between them, and write metrics and values of the rows."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    metrics = []
    own_rows = helpers.valued(helpers.rows(8))[layout.data_rank :: layout.data_size]
    for step in range(2):
        trainer.accumulate([helpers.batch(rows, split) for rows in (own_rows[:2], own_rows[2:])])
        metrics.append(trainer.step(helpers.LR))
        if step == 0:
            helpers.save(out / "critic-i000001-step-000001", trainer, {"step": 1})
    values = trainer.model.forward_values([helpers.batch(own_rows, split)])
    if layout.leader:
        save_file(
            {"values": torch.tensor(np.concatenate(values))},
            out / f"values-{layout.data_rank}.safetensors",
        )
    if dist.get_rank() == 0:
        (out / "critic.json").write_text(json.dumps(metrics))


def check_distillation(trainer: Trainer, out: Path) -> None:
    """Write the likeliest tokens of the model as a teacher, and train two steps with those of another
    teacher."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    own_rows = helpers.taught(helpers.rows(8))[layout.data_rank :: layout.data_size]
    batches = [helpers.batch(rows, split) for rows in (own_rows[:3], own_rows[3:])]
    likeliest = trainer.model.forward_likeliest(batches, 0.9, helpers.TOP_K, 64)
    if layout.leader:
        save_file(
            {"likeliest": torch.tensor(np.concatenate(likeliest))},
            out / f"likeliest-{layout.data_rank}.safetensors",
        )
    metrics = []
    for _ in range(2):
        trainer.accumulate(batches)
        metrics.append(trainer.step(helpers.LR))
    if dist.get_rank() == 0:
        (out / "distill.json").write_text(json.dumps(metrics))


def check_metrics_of_few_ranks(trainer: Trainer) -> None:
    """All ranks get a metric that one rank has, in whichever step it is added."""
    layout = trainer.model.layout
    value = torch.ones((), dtype=torch.float64)
    for steps in range(1, 3):
        if layout.last_stage:
            name = f"rank_{layout.data_rank}_{steps}"
            trainer._sums.add({name: value, "most_max": value * steps})
        of_all_ranks = {f"rank_{rank}_{steps}": 1.0 for rank in range(layout.data_size)}
        heads = trainer._sums.reduce_heads()
        totals = trainer._sums.totals(trainer._sums.reduce_table())
        assert heads == {"weight": 0.0, "tokens": 0.0}
        assert totals == {"most_max": float(steps)} | of_all_ranks
        trainer.discard()


def check_a_slice_of_plain_layers(model: PolicyModel, split: ParallelConfig) -> None:
    """Plain layers have the same distance from float32 as themselves in every layout."""
    config = ModelConfig(dtype="bfloat16", device="cpu")
    layers = parity.LayerSlice.from_spec(model.spec, config, split, {})
    distances = parity.distances(layers, "plain", logprobs.PLAIN)
    assert len(distances) > 5
    for distance in distances.values():
        assert distance.kernels == distance.plain > 0, distances


def check_slices(model: PolicyModel, directory: Path) -> None:
    """The ranks publish each element of the loaded model once."""
    slices = []
    with SafetensorFiles(directory) as files:
        for weights in model.slices():
            expected = files[weights.name][:].narrow(
                weights.axis, weights.start, weights.stop - weights.start
            )
            assert torch.equal(weights.view().reshape(expected.shape), expected), weights.name
            slices.append([weights.name, weights.axis, weights.start, weights.stop])
    gathered = RankChannel(60.0).gather(slices)
    if gathered is not None:
        assert all(gathered)
        tensor_parts = [TensorPart(*values, 0) for values in itertools.chain(*gathered)]
        assert not coverage_error(model.tensors(), tensor_parts)


def check_waits_for_the_leader() -> None:
    """While the leader works, it repeats a message to the other ranks, which they do not take for its
    result."""
    channel._LOOK_S, channel._TELL_S = 0.01, 0.02
    ranks, finish = RankChannel(60.0), threading.Event()
    messages: list[Any] = []
    broadcast = ranks._broadcast

    def broadcast_and_record(message: Any) -> Any:
        messages.append(broadcast(message))
        if len(messages) == 4:
            finish.set()
        return messages[-1]

    ranks._broadcast = broadcast_and_record
    assert ranks.run_on_leader(lambda: finish.wait(60) and [7]) == [7]
    assert messages[:4] == [channel._YET] * 4 and messages[-1] == [7]
    channel._LOOK_S, channel._TELL_S = 1.0, 30.0
    assert ranks.all_agree(True) and not ranks.all_agree(ranks.rank == 0)


def check_rows_that_one_rank_cannot_read() -> None:
    """A shard that is deleted after the leader has read it costs a claim, but no rank fails. A shard
    that is only late is awaited."""
    ranks, channel_of_ranks, is_leader = (
        Ranks.__new__(Ranks),
        RankChannel(60.0),
        dist.get_rank() == 0,
    )
    claim = Claim(
        5,
        0,
        (7,),
        ({"name": "maker-i000001-1-aa-000001.h5", "tickets": [7]},),
        0,
        episodes=(b"\1",),
    )
    returned: list[int] = []
    for held_tickets, expected in (([7], [{"reward": 1.0}]), ([], None)):
        response: Future[list[int]] = Future()
        response.set_result(held_tickets)
        training = SimpleNamespace(settled=lambda leases, response=response: response)
        ranks._client = SimpleNamespace(
            training=training, return_claim=lambda claim: returned.append(claim.lease)
        )
        ranks.reader = LateReader(misses=0 if is_leader else 1)
        assert ranks.rows(claim, channel_of_ranks) == expected
    assert returned == ([5] if is_leader else [])


class LateReader:
    """Reader that finds a shard only after ``misses`` failed reads."""

    def __init__(self, misses: int) -> None:
        self.misses = misses

    def read(self, descriptor: dict[str, Any]) -> dict[str, Row]:
        self.misses -= 1
        if self.misses >= 0:
            raise ShardError(f"{descriptor['name']}: No such file or directory")
        return {"000000007.00.00": {"reward": 1.0}}

    def forget(self, keep: set[str]) -> None: ...


def check(trainer: Trainer, out: Path) -> None:
    """Write log-probs of the rows, train a step, save a checkpoint, and train a second step with
    streamed rows."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    own_rows = helpers.rows(8)[layout.data_rank :: layout.data_size]
    starts = range(0, len(own_rows), 2)
    batches = [helpers.batch(own_rows[start : start + 2], split) for start in starts]
    scores = trainer.model.forward_logprobs(batches, 0.9)
    assert (scores is not None) == layout.leader
    if layout.leader:
        flat = torch.cat([torch.from_numpy(values) for values in scores])
        save_file({"logprobs": flat}, out / f"logprobs-{layout.data_rank}.safetensors")
    inner = helpers.inner_roles(trainer.model)
    inner.begin_step()
    steps = [first_step(trainer, out)]
    helpers.save(out / "i000001-step-000001", trainer, {"step": 1})
    check_a_save_that_fails(trainer, out)
    idle = idle_batch(helpers.rows(1)[0], "cpu", split)
    for window in windows_of(trainer):
        # If a window has fewer rows than there are ranks, some ranks are idle.
        own_batches = window[layout.data_rank]
        trainer.accumulate([helpers.batch(rows, split) if rows else idle for rows in own_batches])
        check_inner(inner, batches, scores)
    steps.append(trainer.step(helpers.LR))
    second = trainer.model.export_hf()
    if second is not None:
        save_file(second, out / "second.safetensors")
        (out / "metrics.json").write_text(json.dumps(steps))


def check_inner(inner: InnerRoles, batches: list[Batch], scores: list[np.ndarray] | None) -> None:
    """Both roles have the weights before the first step, so rows get the same log-probs as then, bit
    for bit. ``scores``: these log-probs on the leader."""
    weights = [value.detach().clone() for value in inner.model.module.parameters()]
    for batch in batches:
        batch.fields.clear()
    inner.score(1, batches)
    assert all(map(torch.equal, inner.model.module.parameters(), weights))
    remaining = None if scores is None else iter(scores)
    for batch in batches:
        if not inner.model.layout.last_stage:
            assert not batch.fields
            continue
        assert torch.equal(batch.fields["ref_logprobs"], batch.fields["old_logprobs"])
        if remaining is not None:
            rows = zip(batch.fields["old_logprobs"], batch.lengths, strict=False)
            for values, length in rows:
                assert np.array_equal(values[:length].numpy(), next(remaining))


def check_a_save_that_fails(trainer: Trainer, out: Path) -> None:
    """If any rank cannot write at any point, all ranks know it, and the next save succeeds."""
    checkpoints = Saver(trainer, RankChannel(20.0), 20.0)
    faults = [
        (StagedState, "write_common", 0),
        (saver, "save_random_state", 1),
        (saver, "checksums_of", 1),
        (FileSystemWriter, "write_data", 1),
    ]
    for owner, name, failing_rank in faults:
        if failing_rank >= dist.get_world_size():
            continue
        fault = RuntimeError("no room") if dist.get_rank() == failing_rank else None
        original = getattr(owner, name)
        with patch.object(owner, name, autospec=True, side_effect=fault or original):
            checkpoints.save(out / "unsaved", {})
            checkpoints.wait()
        assert "no room" in checkpoints.failure, name
    checkpoints.save(out / "saved", {})
    checkpoints.settle()
    assert not list(out.glob("*unsaved*"))


def windows_of(trainer: Trainer) -> list[list[list[list[Row]]]]:
    """Rows as a queue hands them out, [window][rank][micro-batch][row]. A pipeline has one window."""
    layout = trainer.model.layout
    windows = helpers.streamed(helpers.rows(8), layout.data_size, helpers.ARRIVAL)
    assert len(windows) > 1 and all(map(all, windows))
    if layout.pipeline_size == 1:
        return windows
    return [
        [
            list(itertools.chain.from_iterable(window[rank] for window in windows))
            for rank in range(layout.data_size)
        ]
    ]


if __name__ == "__main__":
    main()
