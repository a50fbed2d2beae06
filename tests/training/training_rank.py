"""One rank of a multi-rank training test.

`python -m tests.training.training_rank FILE WORLD RANK [LAYOUT MODEL OUT CHECKPOINT]...`, where the ranks
meet in FILE, and LAYOUT is the `actor` section of a configuration as JSON. Rank 0 writes what it
found to OUT. CHECKPOINT may be empty; from one on a single step is made. Several layouts are done
one after the other: most of a process is its start.
"""

from __future__ import annotations

import json
import sys
import threading
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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
    # A few tokens: the one rank with which these agree has all in one.
    logprobs.SMALLEST_CHUNK = 2**7
    meeting = dist.FileStore(file, int(world))
    for number in range(0, len(cases), 4):
        one_case(
            int(world),
            int(rank),
            dist.PrefixStore(f"{number}", meeting),
            *cases[number : number + 4],
        )


def one_case(
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
        check_who_waits_for_the_leader()
        check_rows_that_one_rank_cannot_read()
        check_metrics_that_few_ranks_have(trainer)
        check(trainer, Path(out))
        if split.data > 1 and split.context == 1:
            check_overlap(Path(model), settings, Path(out))
            if world == 2 and split.expert == 1:
                check_overlap(Path(model), unsharded(settings), Path(out))
        check_critic(helpers.critic(Path(model), **settings), Path(out))
        learned = helpers.learned_from_files(helpers.trainer(Path(model), **settings))
        if rank == 0:
            (Path(out) / "from-files.json").write_text(json.dumps(learned))
        check_distillation(helpers.distiller(Path(model), **settings), Path(out))
    parallel.destroy()


def first_step(trainer: Trainer, out: Path) -> dict[str, float]:
    """Its metrics; OUT/first.safetensors has the weights after it."""
    layout, split, samples = trainer.model.layout, trainer.model.pack_split, helpers.rows(4, seed=9)
    # The second replica has no row in the first step, and goes through all the same.
    trainer.accumulate(
        [
            helpers.batch(samples, split)
            if layout.data_rank == 0
            else idle_batch(samples[0], "cpu", split)
        ]
    )
    metrics = trainer.step(helpers.LR)
    if (weights := trainer.model.export_hf()) is not None:
        save_file(weights, out / "first.safetensors")
    return metrics


def check_critic(trainer: CriticTrainer, out: Path) -> None:
    """Two steps on all rows, a checkpoint between them; what it says of them then."""
    layout, metrics = trainer.model.layout, []
    mine = helpers.valued(helpers.rows(8))[layout.data_rank :: layout.data_size]
    for step in range(2):
        trainer.accumulate(
            [
                helpers.batch(mine[:2], trainer.model.pack_split),
                helpers.batch(mine[2:], trainer.model.pack_split),
            ]
        )
        metrics.append(trainer.step(helpers.LR))
        if step == 0:
            helpers.save(out / "critic-i000001-step-000001", trainer, {"step": 1})
    values = trainer.model.forward_values([helpers.batch(mine, trainer.model.pack_split)])
    if layout.leader:
        save_file(
            {"values": torch.tensor(np.concatenate(values))},
            out / f"values-{layout.data_rank}.safetensors",
        )
    if dist.get_rank() == 0:
        (out / "critic.json").write_text(json.dumps(metrics))


def check_distillation(trainer: Trainer, out: Path) -> None:
    """What the model says as a teacher, and two steps by what another one has said."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    mine = helpers.taught(helpers.rows(8))[layout.data_rank :: layout.data_size]
    micro = [helpers.batch(part, split) for part in (mine[:3], mine[3:])]
    said = trainer.model.forward_likeliest(micro, 0.9, helpers.TOP_K, 64)
    if layout.leader:
        save_file(
            {"said": torch.tensor(np.concatenate(said))},
            out / f"likeliest-{layout.data_rank}.safetensors",
        )
    metrics = []
    for _ in range(2):
        trainer.accumulate(micro)
        metrics.append(trainer.step(helpers.LR))
    if dist.get_rank() == 0:
        (out / "distill.json").write_text(json.dumps(metrics))


def check_metrics_that_few_ranks_have(trainer: Trainer) -> None:
    """All ranks hear of a metric that one has seen, whenever it comes."""
    layout = trainer.model.layout
    one = torch.ones((), dtype=torch.float64)
    for steps in range(1, 3):
        if layout.last_stage:
            name = f"rank_{layout.data_rank}_{steps}"
            trainer._sums.add({name: one, "most_max": one * steps})
        everybody = {f"rank_{rank}_{steps}": 1.0 for rank in range(layout.data_size)}
        heads = trainer._sums.reduce_heads()
        totals = trainer._sums.totals(trainer._sums.reduce_table())
        assert heads == {"weight": 0.0, "tokens": 0.0}
        assert totals == {"most_max": float(steps)} | everybody
        trainer.discard()


def check_a_slice_of_plain_layers(model: PolicyModel, split: ParallelConfig) -> None:
    """It is as near to float32 as itself, however the ranks share it."""
    of = parity.LayerSlice.from_spec(
        model.spec, ModelConfig(dtype="bfloat16", device="cpu"), split, {}
    )
    found = parity.distances(of, "plain", logprobs.PLAIN)
    assert len(found) > 5 and all(one.kernels == one.plain > 0 for one in found.values()), found


def check_slices(model: PolicyModel, directory: Path) -> None:
    """What the ranks publish is the model that was loaded, each element once."""
    parts = []
    with SafetensorFiles(directory) as files:
        for one in model.slices():
            whole = files[one.name][:]
            mine = whole.narrow(one.axis, one.start, one.stop - one.start)
            assert torch.equal(one.view().reshape(mine.shape), mine), one.name
            parts.append([one.name, one.axis, one.start, one.stop])
    gathered = RankChannel(60.0).gather(parts)
    if gathered is not None:
        everybody = [TensorPart(*part, 0) for mine in gathered for part in mine]
        assert all(gathered) and not coverage_error(model.tensors(), everybody)


def check_who_waits_for_the_leader() -> None:
    """However long the leader is at something, the others hear of it, and none of that is taken for
    an answer."""
    channel._LOOK_S, channel._TELL_S = 0.01, 0.02
    line, said, hold = RankChannel(60.0), list[Any](), threading.Event()
    broadcast = line._broadcast

    def counted(message: Any) -> Any:
        said.append(broadcast(message))
        if len(said) == 4:
            hold.set()
        return said[-1]

    line._broadcast = counted
    assert line.run_on_leader(lambda: hold.wait(60) and [7]) == [7]
    assert said[:4] == [channel._YET] * 4 and said[-1] == [7]
    channel._LOOK_S, channel._TELL_S = 1.0, 30.0
    assert line.all_agree(True) and not line.all_agree(line.rank == 0)


def check_rows_that_one_rank_cannot_read() -> None:
    """What a maker took along after the leader had read it costs a claim, and no rank; what is only
    late is awaited."""
    ranks, line, leads = Ranks.__new__(Ranks), RankChannel(60.0), dist.get_rank() == 0
    claim = Claim(
        5,
        0,
        (7,),
        ({"name": "maker-i000001-1-aa-000001.h5", "tickets": [7]},),
        0,
        episodes=(b"\1",),
    )
    returned: list[int] = []
    for held, expected in (([7], [{"reward": 1.0}]), ([], None)):
        answer: Future[list[int]] = Future()
        answer.set_result(held)
        training = SimpleNamespace(settled=lambda leases, answer=answer: answer)
        ranks._client = SimpleNamespace(
            training=training, return_claim=lambda claim: returned.append(claim.lease)
        )
        ranks.reader = LateReader(misses=0 if leads else 1)
        assert ranks.rows(claim, line) == expected
    assert returned == ([5] if leads else [])


class LateReader:
    """Finds a shard only after it has looked ``misses`` times."""

    def __init__(self, misses: int) -> None:
        self.misses = misses

    def read(self, descriptor: dict[str, Any]) -> dict[str, Row]:
        self.misses -= 1
        if self.misses >= 0:
            raise ShardError(f"{descriptor['name']}: No such file or directory")
        return {"000000007.00.00": {"reward": 1.0}}

    def forget(self, keep: set[str]) -> None: ...


def check(trainer: Trainer, out: Path) -> None:
    """Log-probs of the rows, one optimizer step, a checkpoint, and a second step that streams its
    rows."""
    layout, split = trainer.model.layout, trainer.model.pack_split
    mine = helpers.rows(8)[layout.data_rank :: layout.data_size]
    micro = [helpers.batch(mine[start : start + 2], split) for start in range(0, len(mine), 2)]
    scored = trainer.model.forward_logprobs(micro, 0.9)
    assert (scored is not None) == layout.leader
    if layout.leader:
        flat = torch.cat([torch.from_numpy(line) for line in scored])
        save_file({"logprobs": flat}, out / f"logprobs-{layout.data_rank}.safetensors")
    inner = helpers.inner_roles(trainer.model)
    inner.begin_step()
    steps = [first_step(trainer, out)]
    helpers.save(out / "i000001-step-000001", trainer, {"step": 1})
    check_a_save_that_fails(trainer, out)
    for window in windows_of(trainer):
        # Where fewer rows came than there are ranks, some idle.
        mine = window[layout.data_rank]
        trainer.accumulate(
            [
                helpers.batch(rows, split) if rows else idle_batch(helpers.rows(1)[0], "cpu", split)
                for rows in mine
            ]
        )
        check_inner(inner, micro, scored)
    steps.append(trainer.step(helpers.LR))
    second = trainer.model.export_hf()
    if second is not None:
        save_file(second, out / "second.safetensors")
        (out / "metrics.json").write_text(json.dumps(steps))


def check_inner(inner: InnerRoles, micro: list[Batch], scored: list[np.ndarray] | None) -> None:
    """With the weights of before the first step, which both roles have, rows get the log-probs they
    had, to the bit."""
    live = [value.detach().clone() for value in inner.model.module.parameters()]
    for one in micro:
        one.fields.clear()
    inner.score(1, micro)
    assert all(map(torch.equal, inner.model.module.parameters(), live))
    for one in micro:
        if not inner.model.layout.last_stage:
            assert not one.fields
        elif scored is None:
            assert torch.equal(one.fields["ref_logprobs"], one.fields["old_logprobs"])
        else:
            both = one.fields["old_logprobs"], one.fields["ref_logprobs"]
            for line, own, reference, length in zip(scored, *both, one.lengths, strict=False):
                assert torch.equal(own, reference) and np.array_equal(own[:length].numpy(), line)
            scored = scored[len(one.lengths) :]


def check_a_save_that_fails(trainer: Trainer, out: Path) -> None:
    """Whichever rank cannot write, at whichever point: all ranks know, and the next save is as good
    as any."""
    keeper = Saver(trainer, RankChannel(20.0), 20.0)
    faults = [
        (StagedState, "write_common", 0),
        (saver, "save_random_state", 1),
        (saver, "checksums_of", 1),
    ]
    faults.append((FileSystemWriter, "write_data", 1))
    for where, name, victim in [fault for fault in faults if fault[-1] < dist.get_world_size()]:
        real = getattr(where, name)

        def fails(*arguments: Any, real: Any = real, victim: int = victim, **named: Any) -> Any:
            if dist.get_rank() == victim:
                raise RuntimeError("no room")
            return real(*arguments, **named)

        setattr(where, name, fails)
        keeper.save(out / "unsaved", {})
        keeper.wait()
        setattr(where, name, real)
        assert "no room" in keeper.failure, name
    keeper.save(out / "saved", {})
    keeper.settle()
    assert not list(out.glob("*unsaved*"))


def windows_of(trainer: Trainer) -> list[list[list[list[Row]]]]:
    """The rows as a queue deals them out, [window][rank][micro-batch][row]; a pipeline runs them in
    one go."""
    layout = trainer.model.layout
    windows = helpers.streamed(helpers.rows(8), layout.data_size, helpers.ARRIVAL)
    assert len(windows) > 1 and all(rank for window in windows for rank in window)
    if layout.pipeline_size == 1:
        return windows
    return [
        [[part for window in windows for part in window[rank]] for rank in range(layout.data_size)]
    ]


if __name__ == "__main__":
    main()
