"""The optimizer step against an independent one in plain torch, and what may be split over
calls."""

from __future__ import annotations

import dataclasses
import math
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import relax_hpc
from relax_hpc.algorithms import ALGORITHMS, Algorithm, Grpo, Sft
from relax_hpc.algorithms.base import CorrectionConfig
from relax_hpc.algorithms.batch import TokenBatch
from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import OptimizerConfig, ParallelConfig
from relax_hpc.ops.plan.model_memory import CHUNKS, kept_elements
from relax_hpc.queue.row_schema import Row
from relax_hpc.training import logprobs
from relax_hpc.training.models.batches import collate_parts
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.hf_files import read_config
from relax_hpc.training.models.hf_mapping import stored_forms
from relax_hpc.training.models.spec import ModelSpec
from relax_hpc.training.ratio_tail import tail_metrics
from relax_hpc.training.trainer import Trainer
from tests.helpers.convert_helpers import LLAMA, MIXED, model
from tests.helpers.own_algorithm import Opo
from tests.helpers.training_helpers import (  # noqa: F401
    ALGORITHM,
    ARRIVAL,
    CLOSE,
    DEVICE,
    EPS,
    LR,
    actor_settings,
    batch,
    one_rank_fixture,
    policy,
    rows,
    streamed,
    tiny_fixture,
    trainer,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]


def independent_step(
    directory: Path,
    samples: list[Row],
    steps: int,
    loss: Callable[[torch.nn.Module, Row], Tensor] | None = None,
) -> dict[str, Tensor]:
    """Weights after AdamW steps on GRPO's loss, written from the formulas on transformers' model,
    sample by sample."""
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    norms = [value for value in model.parameters() if value.dim() == 1]
    others = [value for value in model.parameters() if value.dim() > 1]
    groups = [{"params": others, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    for _ in range(steps):
        total = sum(
            ((loss or sample_loss)(model, sample) for sample in samples), start=torch.zeros(())
        )
        (total / sum(int(sample["loss_mask"].sum()) for sample in samples)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return split_up(dict(model.state_dict()), directory)


def split_up(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """Each piece by itself: transformers has the experts of a layer in one tensor."""
    forms = {
        name: some[-1]
        for name, some in stored_forms(spec_from_config(read_config(directory))).items()
    }
    return {
        piece.name: part.view(piece.shape)
        for name, value in tensors.items()
        for piece, part in zip(
            forms[name].pieces,
            value.flatten().split([math.prod(p.shape) for p in forms[name].pieces]),
            strict=True,
        )
    }


def sample_loss(model: torch.nn.Module, sample: Row) -> Tensor:
    tokens = torch.from_numpy(sample["token_ids"]).long()[None]
    logp = (model(tokens).logits[0, :-1] / 0.9).log_softmax(-1)
    chosen = logp.gather(-1, tokens[0, 1:, None])[:, 0]
    old, rollout, ref, advantage, mask = (
        torch.from_numpy(sample[name][1:]).float()
        for name in ("old_logprobs", "rollout_logprobs", "ref_logprobs", "advantages", "loss_mask")
    )
    ratio = (chosen - old).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    weight = (old - rollout).exp().clamp(max=2.0)
    kl = ((ref - chosen).exp() - (ref - chosen) - 1).clamp(max=10)
    entropy = -(logp.exp() * logp).sum(-1)
    return (mask * (-weight * surrogate + 0.1 * kl - 0.01 * entropy)).sum()


def difference(left: dict[str, Tensor], right: dict[str, Tensor]) -> float:
    return max((left[name] - right[name]).abs().max().item() for name in left)


@pytest.fixture(name="directory")
def directory_fixture(request: pytest.FixtureRequest, tmp_path: Path, tiny: Path) -> Path:
    """A model of each family."""
    return model(tmp_path / "hf", request.param | {"vocab_size": 64}) if request.param else tiny


@pytest.mark.parametrize(
    "directory", [{}, LLAMA, MIXED], ids=["qwen3", "llama", "qwen3_moe"], indirect=True
)
def test_two_steps_match_an_independent_implementation(directory: Path):
    samples = rows(8)
    ours = trainer(directory)
    for _ in range(2):
        ours.accumulate([batch(samples[:3]), batch(samples[3:])])
        metrics = ours.step(LR)
    found = ours.model.export_hf()
    assert difference(found, independent_step(directory, samples, 2)) < CLOSE
    assert metrics["tokens"] == sum(sample["loss_mask"].sum() for sample in samples)
    assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0.5


def test_the_balance_loss_is_that_of_transformers(tmp_path: Path):
    """Each row a micro-batch, weighted by its trained tokens; theirs is as many times larger as
    experts are chosen."""
    directory, coefficient, values = model(tmp_path / "hf", MIXED | {"vocab_size": 64}), 0.2, []

    def loss(theirs: torch.nn.Module, sample: Row) -> Tensor:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

        tokens = torch.from_numpy(sample["token_ids"]).long()[None]
        layers = theirs(tokens, output_router_logits=True).router_logits
        balance = sum(load_balancing_loss_func((layer,), 4, 2) for layer in layers)
        values.append(coefficient / 2 * int(sample["loss_mask"].sum()) * balance)
        return sample_loss(theirs, sample) + values[-1]

    samples = rows(6)
    algorithm = dataclasses.replace(ALGORITHM, balance_coefficient=coefficient)
    actor = actor_settings(recompute="full")
    ours = Trainer.from_settings(policy(directory, actor=actor), algorithm, actor, temperature=0.9)
    ours.accumulate([batch([sample]) for sample in samples])
    metrics = ours.step(LR)
    assert difference(ours.model.export_hf(), independent_step(directory, samples, 1, loss)) < CLOSE
    assert metrics["loss/balance"] == pytest.approx(
        float(sum(values)) / metrics["tokens"], rel=1e-4
    )
    assert (
        1.0 <= metrics["experts/load_max"] <= 4.0 and 0.5 < metrics["experts/load_entropy"] <= 1.0
    )


def test_routers_decide_in_float32(tmp_path: Path):
    """Of the same hidden states as those of a whole model in bfloat16."""
    ours = policy(model(tmp_path / "hf", MIXED | {"vocab_size": 64}), dtype="bfloat16")
    seen: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer in ours.module.decoder.layers:
        layer.mlp.router.register_forward_hook(
            lambda router, given, made: seen.append((given[0], router.weight, made[0]))
        )
    with torch.no_grad():
        ours.hidden(batch(rows(4)))
    assert len(seen) == 2
    for states, weight, probs in seen:
        exact = (states[:, 0].double() @ weight.double().t()).softmax(-1)
        top, experts = exact.topk(2, -1)
        expected = torch.zeros_like(exact).scatter(1, experts, top / top.sum(-1, keepdim=True))
        assert probs.dtype is torch.float32 and (probs - expected).abs().max() < 1e-5


def test_accumulating_in_pieces_equals_one_call(tiny: Path):
    samples = rows(8)
    whole, pieces = trainer(tiny), trainer(tiny)
    whole.accumulate([batch(samples)])
    for start in (0, 2, 4, 6):
        pieces.accumulate(
            [batch(samples[start : start + 1]), batch(samples[start + 1 : start + 2])]
        )
    pieces.accumulate([])
    left, right = whole.step(LR), pieces.step(LR)
    assert left == pytest.approx(right, rel=1e-4)
    assert difference(whole.model.export_hf(), pieces.model.export_hf()) < CLOSE


def test_streaming_windows_of_balanced_rows_equals_the_whole_batch(tiny: Path):
    samples = rows(8)
    whole, streaming = trainer(tiny), trainer(tiny)
    whole.accumulate([batch(samples)])
    windows = streamed(samples, 1, ARRIVAL)
    assert len(windows) > 1 and windows == streamed(samples, 1, range(4)), "arrival changes nothing"
    for (rank,) in windows:
        streaming.accumulate([batch(part) for part in rank])
    left, right = whole.step(LR), streaming.step(LR)
    assert left == pytest.approx(right, rel=1e-4)
    assert difference(whole.model.export_hf(), streaming.model.export_hf()) < CLOSE


def test_a_step_without_tokens_changes_nothing(tiny: Path):
    ours = trainer(tiny)
    before = ours.model.export_hf()
    masked = [row | {"loss_mask": row["loss_mask"] * 0} for row in rows(2)]
    ours.accumulate([batch(masked)])
    for _ in range(2):
        metrics = ours.step(LR)
        assert (metrics["skipped"], metrics["empty"]) == (0.0, 1.0), (
            "its gradient is 0, which is finite"
        )
    assert difference(before, ours.model.export_hf()) == 0.0


def test_an_idle_micro_batch_adds_nothing(tiny: Path):
    """To the bit, in the metrics too; and nothing is scored in it."""
    ours, alone = trainer(tiny), trainer(tiny)
    samples = rows(4)
    parts = collate_parts(samples, [[0, 3], [], [1, 2], []], DEVICE)
    assert [len(one.lengths) for one in parts] == [2, 0, 2, 0] and {*parts[0].fields} == {
        *parts[1].fields
    }
    ours.accumulate(parts)
    alone.accumulate([parts[0], parts[2]])
    assert ours.step(LR) == alone.step(LR)
    assert difference(ours.model.export_hf(), alone.model.export_hf()) == 0.0
    assert len(ours.model.forward_logprobs(parts, 0.9)) == 4


def test_a_gradient_that_is_not_finite_is_skipped_and_forgotten(tiny: Path):
    ours, clean = trainer(tiny), trainer(tiny)
    before = ours.model.export_hf()
    bad = rows(2, seed=5)
    bad[0]["advantages"][7] = math.inf
    ours.accumulate([batch(bad)])
    metrics = ours.step(LR)
    assert (metrics["skipped"], metrics["empty"]) == (1.0, 0.0) and not math.isfinite(
        metrics["grad_norm"]
    )
    assert difference(before, ours.model.export_hf()) == 0.0
    for each in (ours, clean):
        each.accumulate([batch(rows(2))])
        assert each.step(LR)["skipped"] == 0.0
    assert difference(ours.model.export_hf(), clean.model.export_hf()) == 0.0


@pytest.mark.parametrize(("is_free", "algorithm"), [(False, Grpo()), (True, Grpo()), (True, Sft())])
def test_an_entropy_that_costs_nothing_is_measured(
    tiny: Path, monkeypatch, is_free: bool, algorithm: Algorithm
):
    """Unless nothing would report it, as in supervised learning; it has no part in the loss."""
    monkeypatch.setattr(logprobs.PlainKernels, "entropy_is_free", is_free)
    metrics = []
    for log_entropy in (False, True):
        settings = dataclasses.replace(algorithm, log_entropy=log_entropy)
        ours = Trainer(policy(tiny), settings, OptimizerConfig(lr=LR), temperature=0.9)
        ours.accumulate([batch(rows(2))])
        metrics.append(ours.step(LR))
    measured, logged = metrics
    assert ("entropy" in measured) == (is_free and algorithm.has_advantages)
    assert measured == {name: value for name, value in logged.items() if name in measured}


@pytest.mark.parametrize("count", [3, 200, 2500])
def test_quantiles_of_ratios_are_those_that_so_many_tokens_exceed(tiny: Path, count: int):
    """Log-ratios of either sign; one in 100 or 1,000 of them is at the quantile or above, as if all
    were sorted."""
    ours = trainer(tiny)
    far = np.random.default_rng(count).permutation(np.linspace(-3.0, 3.0, count))
    zero = torch.zeros(1, count, dtype=torch.float64)
    rollout = torch.from_numpy(-far)[None]
    ours._ratios.add(
        TokenBatch(logprobs=zero, old_logprobs=zero, rollout_logprobs=rollout, mask=zero + 1)
    )
    ordered = np.sort(np.abs(far))[::-1]
    expected = {
        "train_rollout_ratio_p99": math.exp(ordered[max(1, math.ceil(0.01 * count)) - 1]),
        "train_rollout_ratio_p999": math.exp(ordered[max(1, math.ceil(0.001 * count)) - 1]),
    }
    assert tail_metrics(ours.log_quantiles(count).tolist()) == pytest.approx(expected, rel=1e-6)


class Operations(TorchDispatchMode):
    """Counts what the device is asked for: views are nothing to it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.found[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def test_the_norm_takes_a_few_operations_however_many_parameters(tiny: Path):
    """One for each, and a wait for each, is what it costs on a GPU as megatron-core comes."""
    ours = trainer(tiny)
    ours.accumulate([batch(rows(2))])
    whole = torch.cat(
        [parameter.main_grad.flatten() for parameter in ours.model.module.parameters()]
    )
    with Operations() as asked:
        square = ours._squared_gradient_norm()
    assert math.sqrt(square) == pytest.approx(float(whole.norm()), rel=1e-5)
    views = {"view", "detach", "slice", "alias"}
    assert sum(count for name, count in asked.found.items() if name not in views) < len(
        list(ours.model.module.parameters())
    )


PACKAGE = Path(relax_hpc.__file__).parent


class HostReads:
    """Counts values that the host reads from tensors, each of which would wait for a GPU."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        for name in ("cpu", "item", "tolist", "__float__", "__int__", "__bool__"):
            monkeypatch.setattr(torch.Tensor, name, self._counted(getattr(torch.Tensor, name)))

    def _counted(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def read_and_count(tensor: torch.Tensor, *args: Any) -> Any:
            caller = sys._getframe(1).f_code
            # These read what `copy_to_host` has copied already, without a wait.
            reads_copy = caller.co_name in ("step", "totals", "metrics", "_evenness")
            is_ours = PACKAGE in Path(caller.co_filename).parents
            self.count += is_ours and not reads_copy
            return read(tensor, *args)

        return read_and_count


@pytest.mark.parametrize("config", [None, MIXED], ids=["qwen3", "qwen3_moe"])
def test_the_host_waits_twice_in_a_step_and_once_more_for_a_new_metric(
    tiny: Path, tmp_path: Path, config: dict | None, monkeypatch: pytest.MonkeyPatch
):
    """Of all that a step tells of: metrics, quantiles, the norm and the load of experts."""
    directory = model(tmp_path / "hf", config | {"vocab_size": 64}) if config else tiny
    ours = trainer(directory)
    counts = []
    for number in range(3):
        ours.accumulate([batch(rows(2))])
        if number == 2:
            ours._sums.add({"new": torch.ones((), device=DEVICE)})
        with monkeypatch.context() as patch:
            reads = HostReads(patch)
            metrics = ours.step(LR)
        counts.append(reads.count)
        assert metrics["grad_norm"] > 0 and ("new" in metrics) == (number == 2)
    assert counts == [3, 2, 3]


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_waits_for_nothing_that_the_device_is_at(tiny: Path, name: str):
    """Neither a value nor a shape is asked of it: it always has the next micro-batch before it is
    done with one."""
    ours, samples = trainer(tiny), rows(3)
    ours._loss = ALGORITHMS[name]().loss
    ours.accumulate([batch(samples)])
    with Operations() as asked, waiting_refused():
        ours.accumulate([batch(samples)])
    assert not asked.found.keys() & {
        "_local_scalar_dense",
        "nonzero",
        "masked_select",
        "unique",
        "equal",
    }


@contextmanager
def waiting_refused() -> Iterator[None]:
    """On a GPU by torch itself, which knows of copies from pageable memory too."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_what_was_discarded_leaves_nothing(tiny: Path):
    ours, clean = trainer(tiny), trainer(tiny)
    ours.accumulate([batch(rows(4, seed=5))])
    ours.discard()
    for each in (ours, clean):
        each.accumulate([batch(rows(2))])
    assert ours.step(LR) == clean.step(LR)
    assert difference(ours.model.export_hf(), clean.model.export_hf()) == 0.0


@pytest.mark.parametrize("config", [None, LLAMA, MIXED], ids=["qwen3", "llama", "qwen3_moe"])
def test_what_is_recomputed_changes_nothing_and_is_not_kept(
    tiny: Path, tmp_path: Path, config: dict | None
):
    """By the bytes that autograd holds for the backward pass, which `relax-hpc plan` reckons
    with."""
    directory = model(tmp_path / "hf", config | {"vocab_size": 64}) if config else tiny
    weights, kept = {}, {}
    for how in ("none", "selective", "full"):
        ours, one = trainer(directory, recompute=how), batch(rows(4))
        with kept_bytes(ours.model.module) as held:
            states = ours.model.hidden(one)
            kept[how] = held() / 4 / ours.model.spec.layers / one.tokens.numel()
        del states
        ours.accumulate([one])
        ours.step(LR)
        weights[how] = ours.model.export_hf()
    for how in ("selective", "full"):
        assert difference(weights["none"], weights[how]) <= 1e-6
        # Beside layers there is the rest of the model, the same thrice.
        spared = reckoned_on_cpu(ours.model.spec, "none") - reckoned_on_cpu(ours.model.spec, how)
        # In float32 attention on a GPU keeps what no run's does.
        if DEVICE == "cpu":
            assert kept["none"] - kept[how] == pytest.approx(spared, rel=0.1), kept


def test_logits_are_reckoned_as_they_come():
    assert (logprobs.SMALLEST_CHUNK, logprobs.LARGEST_CHUNK) == CHUNKS


def reckoned_on_cpu(spec: ModelSpec, how: str) -> int:
    """As `relax-hpc plan`, for a GPU; there norms keep no second copy."""
    by_head = (spec.heads + spec.groups) * spec.head_dim if spec.qk_norm else 0
    extra = {"none": 2 * spec.hidden + by_head, "selective": by_head, "full": 0}[how]
    return kept_elements(spec, ParallelConfig(), how) + extra


@contextmanager
def kept_bytes(module: torch.nn.Module) -> Iterator[Callable[[], int]]:
    """Of the tensors that autograd holds since the block began, parameters left out, each piece of
    memory once."""
    parameters = {one.untyped_storage().data_ptr() for one in module.parameters()}

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            living.add(self)

    living: weakref.WeakSet[Kept] = weakref.WeakSet()

    def size() -> int:
        storages = [one.tensor.untyped_storage() for one in living]
        found = {
            one.data_ptr(): one.nbytes() for one in storages if one.data_ptr() not in parameters
        }
        return sum(found.values())

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        yield size


def test_settings_of_megatron_core_reach_it(tiny: Path):
    ours = trainer(
        tiny,
        megatron={
            "persist_layer_norm": False,
            "check_for_nan_in_grad": True,
            "recompute_modules": ["mlp"],
        },
        recompute="selective",
    )
    assert ours.model.config.recompute_modules == ["mlp"]
    assert ours.module.ddp_config.check_for_nan_in_grad
    with pytest.raises(ConfigError, match="hidden_size: found 8, not allowed"):
        trainer(tiny, megatron={"hidden_size": 8})
    with pytest.raises(
        ConfigError, match="refuses it with the other settings: When using recompute_granularity"
    ):
        trainer(tiny, recompute="selective", megatron={"recompute_num_layers": 1})


def test_missing_old_logprobs_mean_the_policys_own(tiny: Path):
    ours = Trainer(policy(tiny), Grpo(), OptimizerConfig(lr=LR), 1.0)
    plain = [
        {name: row[name] for name in ("token_ids", "loss_mask", "advantages")} for row in rows(4)
    ]
    ours.accumulate([batch(plain)])
    metrics = ours.step(LR)
    assert metrics["ratio"] == pytest.approx(1.0) and metrics["correction_weight"] == 1.0
    assert "kl/reference" not in metrics


def test_bfloat16_trains(tiny: Path):
    ours = trainer(tiny, dtype="bfloat16")
    before = ours.model.export_hf()
    ours.accumulate([batch(rows(4))])
    assert ours.step(LR)["skipped"] == 0.0
    after = ours.model.export_hf()
    assert difference(before, after) > 0.0
    assert all(
        value.dtype == torch.bfloat16 and torch.isfinite(value).all() for value in after.values()
    )


def test_a_metric_that_comes_only_sometimes_is_written(tiny: Path):
    ours = Trainer(
        policy(tiny), Opo(correction=CorrectionConfig(kind="off")), OptimizerConfig(lr=LR), 1.0
    )
    found = []
    for sign in (1.0, -1.0, 1.0):
        ours.accumulate(
            [batch([row | {"advantages": sign * np.abs(row["advantages"])}]) for row in rows(2)]
        )
        found.append(ours.step(LR).get("algorithm/pushed_away"))
    assert found == [None, 1.0, None]


def test_entropy_is_computed_where_it_is_asked_for(tiny: Path):
    for algorithm, there in (
        (Grpo(), False),
        (Grpo(log_entropy=True), True),
        (Grpo(entropy_coefficient=0.1), True),
    ):
        ours = Trainer(policy(tiny), algorithm, OptimizerConfig(lr=LR), 1.0)
        ours.accumulate([batch(rows(2))])
        assert ("entropy" in ours.step(LR)) == there


def test_supervised_loss_falls(tiny: Path):
    ours = Trainer(policy(tiny), Sft(), OptimizerConfig(lr=1e-2), 1.0)
    losses = []
    for _ in range(15):
        ours.accumulate([batch(rows(4))])
        losses.append(ours.step(1e-2)["loss/policy"])
    assert losses[-1] < 0.5 * losses[0]
