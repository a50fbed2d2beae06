"""Values and gradients of Triton kernels compared with plain layers. On a CPU, Triton's interpreter
runs the kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from relax_hpc.algorithms import Sft
from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import ActorConfig, Kernels, OptimizerConfig, TinyModelConfig
from relax_hpc.queue.row_schema import Row
from relax_hpc.training.models.tiny_model import make_tiny_model
from relax_hpc.training.trainer import Trainer
from tests.helpers.training_helpers import (  # noqa: F401
    ALGORITHM,
    EPS,
    LR,
    batch,
    load,
    one_rank_fixture,
    policy,
    rows,
    save,
    tiny_fixture,
    trainer,
)
from tests.requirements import DEVICE, requires
from tests.training.test_training_logprobs import OneRank, inputs

requires("triton", "megatron")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("one_rank")]
from relax_hpc.training.models.norm import RMSNorm  # noqa: E402

NEAR = {"atol": 1e-5, "rtol": 1e-5}


def assert_equal(
    ours: Callable[..., Any], theirs: Callable[..., Any], *arguments: torch.Tensor
) -> None:
    """Compare the values of two functions, and their gradients of all ``arguments``."""
    results = []
    for function in (ours, theirs):
        leaves = [value.detach().clone().to(DEVICE).requires_grad_() for value in arguments]
        result = function(*leaves)
        direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        (result * direction).sum().backward()
        results.append([result.detach(), *(leaf.grad for leaf in leaves)])
    for value, expected in zip(*results, strict=True):
        torch.testing.assert_close(value, expected, **NEAR)


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize(("rows", "columns"), [(1, 8), (7, 48), (600, 16), (3, 5000)])
def test_norm(rows: int, columns: int):
    from relax_hpc.training.models import triton_layers

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return triton_layers._RMSNorm.apply(x, weight, 1e-6)

    def theirs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, weight.shape, weight, 1e-6)

    assert_equal(ours, theirs, random(rows, columns), random(columns))
    # The keys of heads are a slice of a wider tensor.
    assert_equal(
        lambda x, weight: ours(x[:, :, :columns], weight),
        lambda x, weight: theirs(x[:, :, :columns], weight),
        random(rows, 2, columns + 8),
        random(columns),
    )


@pytest.mark.parametrize(("s", "b", "heads", "dim"), [(5, 1, 1, 4), (6, 3, 5, 24), (9, 2, 4, 16)])
def test_rotary(s: int, b: int, heads: int, dim: int):
    from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd

    from relax_hpc.training.models import triton_layers

    # The last position is large, so that a sine of low precision fails.
    positions = torch.cat([torch.arange(s - 1), torch.tensor([131071])])
    angles = positions[:, None] * 10000.0 ** -torch.linspace(0, 1, dim // 2)
    angles = torch.cat([angles, angles], 1)[:, None, None].to(DEVICE)
    for cut in (slice(None), slice(0, heads)):
        states = random(s, b, 2 * heads, dim) if cut.stop else random(s, b, heads, dim)
        assert_equal(
            lambda t, cut=cut: triton_layers.rotary(t[:, :, cut], angles),
            lambda t, cut=cut: _apply_rotary_pos_emb_bshd(t[:, :, cut], angles),
            states,
        )
    with pytest.raises(ConfigError, match="found fused with angles of shape"):
        triton_layers.rotary(states[:, :, :heads].to(DEVICE), angles[..., : dim // 2])


@pytest.mark.parametrize("shape", [(1, 2), (5, 3, 34), (70, 2, 128)])
def test_gated_activation(shape: tuple[int, ...]):
    from relax_hpc.training.models import triton_layers

    def plain(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return F.silu(gate) * up

    assert_equal(triton_layers.swiglu, plain, random(*shape) * 3)


@pytest.mark.parametrize(
    ("vocab", "temperature", "entropy", "alternatives"),
    [(37, 0.7, True, 0), (5000, 1.0, True, 2), (37, 1.3, False, 3)],
)
def test_logprobs_of_a_chunk(vocab: int, temperature: float, entropy: bool, alternatives: int):
    from relax_hpc.training.logprobs import PLAIN, token_logprobs
    from relax_hpc.training.triton_logprobs import TritonKernels

    states, weight, targets = inputs(9, 8, columns=vocab + 3, vocab=vocab, dtype=torch.float32)
    # The target is also the first alternative; the following token numbers are the next ones.
    columns = [targets, *((targets + number) % vocab for number in range(alternatives))]
    targets = torch.stack(columns, 1).to(DEVICE)

    def logprobs_by(kernels: Any) -> Callable[..., torch.Tensor]:
        def values(states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            logprobs, entropies = token_logprobs(
                states, weight, targets, vocab, temperature, OneRank(), entropy, kernels
            )
            return torch.cat([logprobs, entropies[:, None]], 1) if entropy else logprobs

        return values

    assert_equal(logprobs_by(TritonKernels()), logprobs_by(PLAIN), states, weight)


@pytest.mark.parametrize("columns", [5, 32, 4100])
@pytest.mark.parametrize("padded", [False, True])
def test_logits_of_a_shard_with_and_without_padded_rows(columns: int, padded: bool):
    """Another rank has some targets. Kernels overwrite no row of another token."""
    from relax_hpc.training.logprobs import PLAIN, Chunk, Upstream, padded_rows
    from relax_hpc.training.triton_logprobs import TritonKernels

    kernels, values = TritonKernels(), 3 * random(5, columns).to(DEVICE)
    targets = torch.tensor([[0, -1], [columns - 1, 0], [-1, -1], [1, 1], [4, 2]], device=DEVICE)
    multiple = kernels.row_multiple if padded else 1
    logits = padded_rows(values, 5, columns, multiple).copy_(values)
    assert logits.stride(0) == columns + -columns % multiple
    chunk = Chunk(logits, targets, 0.7)
    terms = PLAIN.terms(Chunk(values.clone(), targets, 0.7), True)
    for value, exact in zip(kernels.terms(chunk, True), terms, strict=True):
        torch.testing.assert_close(value, exact, **NEAR)
    log_total = terms[1].log() + terms[0]
    entropies = terms[1].log() - terms[2] / terms[1]
    slopes = random(5, 2).to(DEVICE)
    upstream = Upstream(log_total, entropies, slopes, slopes[:, 1] - slopes[:, 0])
    exact = PLAIN.slopes(Chunk(values, targets, 0.7), upstream)
    torch.testing.assert_close(kernels.slopes(chunk, upstream), exact, **NEAR)


def test_a_step_equals_that_of_plain_layers(tiny: Path):
    """Compare log-probs, metrics and weights. The optimizer is one kernel too."""
    steps = []
    for kernels in ("plain", "fused"):
        ours = trainer(tiny, kernels=kernels)
        logprobs = ours.model.forward_logprobs([batch(rows(1))], 0.9)
        ours.accumulate([batch(rows(2))])
        steps.append((np.concatenate(logprobs), ours.step(LR), ours.model.export_hf()))
    adam = ours.optimizer.chained_optimizers[0].optimizer
    assert all(group["fused"] for group in adam.param_groups)
    np.testing.assert_allclose(steps[1][0], steps[0][0], atol=1e-5)
    assert steps[1][1] == pytest.approx(steps[0][1], rel=1e-4, abs=1e-6)
    for name, value in steps[0][2].items():
        torch.testing.assert_close(steps[1][2][name], value, atol=2e-5, rtol=0)


def gradients(
    directory: Path, dtype: str, kernels: Kernels, packs: list[list[Row]]
) -> dict[str, torch.Tensor]:
    """Gradients of a supervised loss by parameter. This loss is smooth, so a rounding cannot move a
    token's ratio across a bound."""
    model = policy(directory, dtype=dtype, actor=ActorConfig(kernels=kernels))
    ours = Trainer(model, Sft(), OptimizerConfig(), 1.0)
    ours.accumulate([batch(pack) for pack in packs])
    return {
        name: parameter.main_grad.detach().float().cpu()
        for name, parameter in model.module.named_parameters()
    }


def test_gradients_are_as_near_to_float32_as_those_of_plain_layers(tmp_path: Path):
    """Compare the error of the whole gradient and of each parameter in bfloat16. It decides whether
    fused kernels can be the default."""
    large = DEVICE != "cpu"
    shape = TinyModelConfig(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
    if large:
        shape = TinyModelConfig(
            hidden_size=512,
            intermediate_size=1536,
            num_layers=4,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=64,
        )
    make_tiny_model(tmp_path / "hf", shape, seed=3)
    stored = load_file(tmp_path / "hf/model.safetensors")
    # Rounded to bfloat16, so that all three models have the same weights.
    rounded = {
        name: (4 * value if value.dim() > 1 else value).bfloat16().float()
        for name, value in stored.items()
    }
    save_file(rounded, tmp_path / "hf/model.safetensors", metadata={"format": "pt"})
    generator = np.random.default_rng(0)
    lengths = range(2, 400) if large else (2, 5, 17, 30)

    def random_row(length: int) -> Row:
        tokens = generator.integers(3, 64, length).astype(np.int32)
        return {"token_ids": tokens, "loss_mask": np.arange(length) > 0}

    packs = [list(map(random_row, lengths[start::3])) for start in (0, 1)]
    exact, plain, fused = (
        gradients(tmp_path / "hf", dtype, kernels, packs)
        for dtype, kernels in (("float32", "plain"), ("bfloat16", "plain"), ("bfloat16", "fused"))
    )

    def relative_errors(values: dict[str, torch.Tensor]) -> dict[str, float]:
        errors = {
            name: float((values[name] - exact[name]).norm() / exact[name].norm()) for name in exact
        }
        flat = torch.cat([values[name].flatten() for name in exact])
        flat_exact = torch.cat([value.flatten() for value in exact.values()])
        return errors | {"all": float((flat - flat_exact).norm() / flat_exact.norm())}

    ours, theirs = relative_errors(fused), relative_errors(plain)
    # Triton's interpreter truncates to bfloat16, a GPU rounds: the error of a value is doubled.
    limit = 1.1 if large else 2.2
    assert 0 < theirs["all"] < 0.1 and ours["all"] <= limit * theirs["all"]
    for name, error in ours.items():
        assert error <= 1.5 * limit * theirs[name], name


def with_adam(directory: Path, kernels: Kernels, distributed: bool) -> Trainer:
    """Trainer with plain layers, which are fast on a CPU, and the Adam of `kernels`."""
    model = policy(directory)
    model.kernels = kernels
    return Trainer(
        model, ALGORITHM, OptimizerConfig(lr=LR, eps=EPS, distributed=distributed), temperature=0.9
    )


@pytest.mark.parametrize("distributed", [False, True])
def test_the_optimizer_resumes_from_checkpoints_of_other_kernels(
    tiny: Path, tmp_path: Path, distributed: bool
):
    """The weights are those of a run without an interruption. The kernel of Adam follows the current
    setting, not the checkpoint."""
    weights = []
    for number, (before, after) in enumerate(
        [("plain", "plain"), ("plain", "fused"), ("fused", "plain")]
    ):
        folder = tmp_path / f"i00000{number}-step-000001"
        first = with_adam(tiny, before, distributed)
        first.accumulate([batch(rows(4, seed=1))])
        first.step(LR)
        save(folder, first, {"step": 1})
        ours = with_adam(tiny, after, distributed)
        load(folder, ours)
        adam = ours.optimizer.chained_optimizers[0].optimizer
        # With None, torch updates all parameters together on a GPU; with False it would not.
        expected = (True if after == "fused" else None, None)
        assert all((group["fused"], group["foreach"]) == expected for group in adam.param_groups)
        ours.accumulate([batch(rows(4, seed=2))])
        ours.step(LR)
        weights.append(ours.model.export_hf())
    for resumed in weights[1:]:
        for name, value in weights[0].items():
            torch.testing.assert_close(resumed[name], value, atol=2e-5, rtol=0)


@pytest.fixture(
    name="wrong",
    params=["te norm", "fused norm", "log-probabilities", "entropies", "weight gradient"],
)
def wrong_fixture(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> tuple[Kernels, str]:
    """Kernels with a fault, and text of the error. Plain layers with the name `te` replace those of
    Transformer Engine, which is not installed."""
    from relax_hpc.training import triton_logprobs
    from relax_hpc.training.models import kernels, pieces, stage_model, triton_layers

    if request.param == "te norm":
        monkeypatch.setattr(kernels, "prepare", lambda *_: None)
        monkeypatch.setitem(pieces.NAMES, "te", pieces.NAMES["local"])
        monkeypatch.setattr(
            stage_model, "layer_spec", lambda config, kernels: te_with(WrongNorm, config, kernels)
        )
        return "te", "log-probabilities and entropies 0."
    if request.param == "fused norm":
        monkeypatch.setattr(triton_layers.FusedRMSNorm, "forward", WrongNorm.forward)
        return "fused", "log-probabilities and entropies 0."
    kernel_class = triton_logprobs.TritonKernels
    if request.param == "weight gradient":
        slopes = kernel_class.slopes
        monkeypatch.setattr(
            kernel_class, "slopes", lambda self, *arguments: 1.1 * slopes(self, *arguments)
        )
        return "fused", "gradient of embedding."
    wrong_term = {"log-probabilities": 3, "entropies": 2}[request.param]
    terms = kernel_class.terms

    def wrong_terms(self: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
        values = list(terms(self, *arguments))
        values[wrong_term] = 1.1 * values[wrong_term]
        return tuple(values)

    monkeypatch.setattr(kernel_class, "terms", wrong_terms)
    return "fused", "log-probabilities and entropies 0."


class WrongNorm(RMSNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 1.1 * F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def te_with(norm: type[RMSNorm], config: Any, kernels: Kernels) -> Any:
    """Plain layers. If ``kernels`` is `te`, their norm is replaced."""
    from relax_hpc.training.models.layer_spec import layer_spec

    block = layer_spec(config, "plain")
    if kernels == "te":
        block.layer_norm = block.layer_specs[0].submodules.input_layernorm = norm
    return block


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_that_compute_other_values_are_refused_at_start(
    tiny: Path, dtype: str, wrong: tuple[Kernels, str], monkeypatch: pytest.MonkeyPatch
):
    from relax_hpc.training import parity

    monkeypatch.setattr(parity, "LENGTHS", (9, 2, 14))
    kernels, fault = wrong
    with pytest.raises(ConfigError) as error:
        policy(tiny, dtype=dtype, actor=ActorConfig(kernels=kernels))
    message = str(error.value)
    assert error.value.exit_code == 78 and message.count("\n") == 0
    setting = f"actor.kernels: found {kernels}, with which this model computes different values; "
    assert setting in message
    assert f"times that of plain layers: {fault}" in message
    package = "triton" if kernels == "fused" else "transf"
    assert f"set plain, or install another release of {package}" in message
