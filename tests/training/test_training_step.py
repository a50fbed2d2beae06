"""The optimizer step compared with an independent one in plain torch, and with steps that are
divided into several calls."""

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
    """Weights of a model of transformers after AdamW steps with the loss of GRPO.

    The loss is computed sample by sample, from its formulas.
    """
    from relax_hpc.base.transformers_hook import install_transformers_hook

    install_transformers_hook()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).train()
    norms = [value for value in model.parameters() if value.dim() == 1]
    matrices = [value for value in model.parameters() if value.dim() > 1]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS)
    for _ in range(steps):
        losses = [(loss or sample_loss)(model, sample) for sample in samples]
        total = sum(losses, start=torch.zeros(()))
        (total / sum(int(sample["loss_mask"].sum()) for sample in samples)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return split_into_pieces(dict(model.state_dict()), directory)


def split_into_pieces(tensors: dict[str, Tensor], directory: Path) -> dict[str, Tensor]:
    """One tensor for each expert. transformers has the experts of a layer in one tensor."""
    forms = stored_forms(spec_from_config(read_config(directory)))
    result = {}
    for name, value in tensors.items():
        pieces = forms[name][-1].pieces
        sizes = [math.prod(piece.shape) for piece in pieces]
        for piece, elements in zip(pieces, value.flatten().split(sizes), strict=True):
            result[piece.name] = elements.view(piece.shape)
    return result


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


def difference(values: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Largest absolute difference of an element."""
    return max((values[name] - expected[name]).abs().max().item() for name in values)


@pytest.fixture(name="directory")
def directory_fixture(request: pytest.FixtureRequest, tmp_path: Path, tiny: Path) -> Path:
    """A model of a family."""
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
    expected = independent_step(directory, samples, 2)
    assert difference(ours.model.export_hf(), expected) < CLOSE
    assert metrics["tokens"] == sum(sample["loss_mask"].sum() for sample in samples)
    assert metrics["skipped"] == 0.0 and metrics["grad_norm"] > 0.5


def test_the_balance_loss_is_that_of_transformers(tmp_path: Path):
    """Each row is a micro-batch, weighted by its trained tokens. The loss of transformers is larger,
    by the number of experts per token."""
    directory, coefficient = model(tmp_path / "hf", MIXED | {"vocab_size": 64}), 0.2
    values: list[Tensor] = []

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
        float(torch.stack(values).detach().sum()) / metrics["tokens"], rel=1e-4
    )
    assert (
        1.0 <= metrics["experts/load_max"] <= 4.0 and 0.5 < metrics["experts/load_entropy"] <= 1.0
    )


def test_routers_decide_in_float32(tmp_path: Path):
    """Their hidden states are those of a model in bfloat16."""
    ours = policy(model(tmp_path / "hf", MIXED | {"vocab_size": 64}), dtype="bfloat16")
    calls: list[tuple[Tensor, Tensor, Tensor]] = []
    for layer in ours.module.decoder.layers:
        layer.mlp.router.register_forward_hook(
            lambda router, inputs, outputs: calls.append((inputs[0], router.weight, outputs[0]))
        )
    with torch.no_grad():
        ours.hidden(batch(rows(4)))
    assert len(calls) == 2
    for states, weight, probs in calls:
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
    expected, metrics = whole.step(LR), pieces.step(LR)
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert difference(whole.model.export_hf(), pieces.model.export_hf()) < CLOSE


def test_streaming_windows_of_balanced_rows_equals_the_whole_batch(tiny: Path):
    samples = rows(8)
    whole, streaming = trainer(tiny), trainer(tiny)
    whole.accumulate([batch(samples)])
    windows = streamed(samples, 1, ARRIVAL)
    assert len(windows) > 1 and windows == streamed(samples, 1, range(4)), "arrival changes nothing"
    for (rank,) in windows:
        streaming.accumulate([batch(micro_batch) for micro_batch in rank])
    expected, metrics = whole.step(LR), streaming.step(LR)
    assert metrics == pytest.approx(expected, rel=1e-4)
    assert difference(whole.model.export_hf(), streaming.model.export_hf()) < CLOSE


def test_a_step_without_tokens_changes_nothing(tiny: Path):
    ours = trainer(tiny)
    before = ours.model.export_hf()
    masked = [row | {"loss_mask": row["loss_mask"] * 0} for row in rows(2)]
    ours.accumulate([batch(masked)])
    for _ in range(2):
        metrics = ours.step(LR)
        # The gradient is 0, which is finite, so the step is not skipped.
        assert (metrics["skipped"], metrics["empty"]) == (0.0, 1.0)
    assert difference(before, ours.model.export_hf()) == 0.0


def test_an_idle_micro_batch_adds_nothing(tiny: Path):
    """Weights and metrics are equal bit for bit, and it has no log-probabilities."""
    ours, without_idle = trainer(tiny), trainer(tiny)
    samples = rows(4)
    batches = collate_parts(samples, [[0, 3], [], [1, 2], []], DEVICE)
    assert [len(micro_batch.lengths) for micro_batch in batches] == [2, 0, 2, 0]
    assert batches[0].fields.keys() == batches[1].fields.keys()
    ours.accumulate(batches)
    without_idle.accumulate([batches[0], batches[2]])
    assert ours.step(LR) == without_idle.step(LR)
    assert difference(ours.model.export_hf(), without_idle.model.export_hf()) == 0.0
    assert len(ours.model.forward_logprobs(batches, 0.9)) == 4


def test_a_gradient_that_is_not_finite_is_skipped_and_discarded(tiny: Path):
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
def test_an_entropy_without_cost_is_measured(
    tiny: Path, monkeypatch, is_free: bool, algorithm: Algorithm
):
    """Except if nothing reports it, as in supervised learning. It is no term of the loss."""
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
def test_quantiles_of_ratios_equal_those_of_sorted_ratios(tiny: Path, count: int):
    """One in 100 or 1,000 log-ratios, of either sign, is at the quantile or above."""
    ours = trainer(tiny)
    log_ratios = np.random.default_rng(count).permutation(np.linspace(-3.0, 3.0, count))
    zero = torch.zeros(1, count, dtype=torch.float64)
    rollout = torch.from_numpy(-log_ratios)[None]
    ours._ratios.add(
        TokenBatch(logprobs=zero, old_logprobs=zero, rollout_logprobs=rollout, mask=zero + 1)
    )
    ordered = np.sort(np.abs(log_ratios))[::-1]
    expected = {
        "train_rollout_ratio_p99": math.exp(ordered[max(1, math.ceil(0.01 * count)) - 1]),
        "train_rollout_ratio_p999": math.exp(ordered[max(1, math.ceil(0.001 * count)) - 1]),
    }
    assert tail_metrics(ours.log_quantiles(count).tolist()) == pytest.approx(expected, rel=1e-6)


class Operations(TorchDispatchMode):
    """Counts operations of the device. Views are counted too, although they cost it nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        self.counts[operation.overloadpacket.__name__] += 1
        return operation(*args, **(kwargs or {}))


def test_the_norm_needs_fewer_operations_than_there_are_parameters(tiny: Path):
    """megatron-core 0.16.1 needs an operation and a wait for each parameter on a GPU."""
    ours = trainer(tiny)
    ours.accumulate([batch(rows(2))])
    whole = torch.cat(
        [parameter.main_grad.flatten() for parameter in ours.model.module.parameters()]
    )
    with Operations() as operations:
        square = ours._squared_gradient_norm()
    assert math.sqrt(square) == pytest.approx(float(whole.norm()), rel=1e-5)
    views = {"view", "detach", "slice", "alias"}
    computed = [count for name, count in operations.counts.items() if name not in views]
    assert sum(computed) < len(list(ours.model.module.parameters()))


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
            # These functions read values that `copy_to_host` has copied, without a wait.
            reads_copy = caller.co_name in ("step", "totals", "metrics", "_evenness")
            is_ours = PACKAGE in Path(caller.co_filename).parents
            self.count += is_ours and not reads_copy
            return read(tensor, *args)

        return read_and_count


@pytest.mark.parametrize("config", [None, MIXED], ids=["qwen3", "qwen3_moe"])
def test_the_host_waits_twice_in_a_step_and_once_more_for_a_new_metric(
    tiny: Path, tmp_path: Path, config: dict | None, monkeypatch: pytest.MonkeyPatch
):
    """A step reports metrics, quantiles, the norm and the load of experts."""
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
def test_the_host_does_not_wait_for_the_device_in_a_micro_batch(tiny: Path, name: str):
    """It reads neither values nor shapes, so the device always has the next micro-batch before the
    current one ends."""
    ours, samples = trainer(tiny), rows(3)
    ours._loss = ALGORITHMS[name]().loss
    ours.accumulate([batch(samples)])
    with Operations() as operations, waits_refused():
        ours.accumulate([batch(samples)])
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "equal"}
    assert not operations.counts.keys() & waits


@contextmanager
def waits_refused() -> Iterator[None]:
    """On a GPU, let torch raise an error for each wait. It also detects copies from pageable
    memory."""
    if DEVICE == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_discarded_rows_change_nothing(tiny: Path):
    ours, clean = trainer(tiny), trainer(tiny)
    ours.accumulate([batch(rows(4, seed=5))])
    ours.discard()
    for each in (ours, clean):
        each.accumulate([batch(rows(2))])
    assert ours.step(LR) == clean.step(LR)
    assert difference(ours.model.export_hf(), clean.model.export_hf()) == 0.0


@pytest.mark.parametrize("config", [None, LLAMA, MIXED], ids=["qwen3", "llama", "qwen3_moe"])
def test_recomputation_changes_no_weights_and_saves_memory(
    tiny: Path, tmp_path: Path, config: dict | None
):
    """The bytes that autograd keeps for the backward pass are those that `relax-hpc plan`
    calculates."""
    directory = model(tmp_path / "hf", config | {"vocab_size": 64}) if config else tiny
    weights: dict[str, dict[str, Tensor]] = {}
    kept: dict[str, float] = {}
    for recompute in ("none", "selective", "full"):
        ours, micro_batch = trainer(directory, recompute=recompute), batch(rows(4))
        spec = ours.model.spec
        with kept_bytes(ours.model.module) as count_bytes:
            states = ours.model.hidden(micro_batch)
            # Elements of 4 bytes, for each token and layer.
            kept[recompute] = count_bytes() / 4 / spec.layers / micro_batch.tokens.numel()
        del states
        ours.accumulate([micro_batch])
        ours.step(LR)
        weights[recompute] = ours.model.export_hf()
    for recompute in ("selective", "full"):
        assert difference(weights["none"], weights[recompute]) <= 1e-6
        # The difference excludes embedding and output layer, which are the same in all three.
        saved = planned_elements_on_cpu(spec, "none") - planned_elements_on_cpu(spec, recompute)
        # In float32, attention on a GPU keeps other tensors than in a run.
        if DEVICE == "cpu":
            assert kept["none"] - kept[recompute] == pytest.approx(saved, rel=0.1), kept


def test_the_plan_uses_the_chunk_sizes_of_training():
    assert (logprobs.SMALLEST_CHUNK, logprobs.LARGEST_CHUNK) == CHUNKS


def planned_elements_on_cpu(spec: ModelSpec, recompute: str) -> int:
    """Kept elements per token and layer. `relax-hpc plan` calculates those of a GPU, where norms keep
    no second copy."""
    by_head = (spec.heads + spec.groups) * spec.head_dim if spec.qk_norm else 0
    extra = {"none": 2 * spec.hidden + by_head, "selective": by_head, "full": 0}[recompute]
    return kept_elements(spec, ParallelConfig(), recompute) + extra


@contextmanager
def kept_bytes(module: torch.nn.Module) -> Iterator[Callable[[], int]]:
    """Yield a function that counts the bytes that autograd has kept since the block began.

    Parameters are excluded. Tensors that share memory are counted once.
    """
    parameters = {value.untyped_storage().data_ptr() for value in module.parameters()}

    class Kept:
        def __init__(self, tensor: Tensor) -> None:
            self.tensor = tensor
            living.add(self)

    living: weakref.WeakSet[Kept] = weakref.WeakSet()

    def size() -> int:
        storages = [kept.tensor.untyped_storage() for kept in living]
        sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
        return sum(size for address, size in sizes.items() if address not in parameters)

    with torch.autograd.graph.saved_tensors_hooks(Kept, lambda kept: kept.tensor):
        yield size


def test_settings_of_megatron_core_are_passed_on(tiny: Path):
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


def test_without_old_logprobs_those_of_the_policy_are_used(tiny: Path):
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


def test_a_metric_of_some_steps_is_written(tiny: Path):
    ours = Trainer(
        policy(tiny), Opo(correction=CorrectionConfig(kind="off")), OptimizerConfig(lr=LR), 1.0
    )
    values = []
    for sign in (1.0, -1.0, 1.0):
        samples = [row | {"advantages": sign * np.abs(row["advantages"])} for row in rows(2)]
        ours.accumulate([batch([sample]) for sample in samples])
        values.append(ours.step(LR).get("algorithm/pushed_away"))
    assert values == [None, 1.0, None]


@pytest.mark.parametrize(
    ("algorithm", "has_entropy"),
    [
        (Grpo(), False),
        (Grpo(log_entropy=True), True),
        (Grpo(entropy_coefficient=0.1), True),
    ],
)
def test_entropy_is_computed_if_a_setting_needs_it(
    tiny: Path, algorithm: Algorithm, has_entropy: bool
):
    ours = Trainer(policy(tiny), algorithm, OptimizerConfig(lr=LR), 1.0)
    ours.accumulate([batch(rows(2))])
    assert ("entropy" in ours.step(LR)) == has_entropy


def test_supervised_loss_falls(tiny: Path):
    ours = Trainer(policy(tiny), Sft(), OptimizerConfig(lr=1e-2), 1.0)
    losses = []
    for _ in range(15):
        ours.accumulate([batch(rows(4))])
        losses.append(ours.step(1e-2)["loss/policy"])
    assert losses[-1] < 0.5 * losses[0]
