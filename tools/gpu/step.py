"""Seconds and memory of a training step, ours or that of transformers, with random weights and
tokens.

MFU counts the operations that the model needs (relax_hpc.training.models.flops). The peers' loss is
plain cross entropy, without entropies and ratios. Peers with float32 masters keep the same states
as our optimizer; other peers keep bfloat16 weights only.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
from child import answer, sync
from policies import policy, settings_of, trainer
from shapes import hf_config, rows

from relax_hpc.base.transformers_hook import install_transformers_hook
from relax_hpc.config.schema import ActorConfig, Config
from relax_hpc.ops.plan import roles
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.flops import peak_flops, training_flops

if TYPE_CHECKING:
    from policies import Section

    from relax_hpc.training.trainer import Trainer

Acts = tuple[Callable[[], object], Callable[[], object]]
"""Forward and backward of all micro-batches, and the optimizer's step."""
MicroBatches = list[list[dict[str, Any]]]
"""Rows of each micro-batch."""


def acts_of_trainer(trained: Trainer, micro_batches: MicroBatches, device: str) -> Acts:
    """Our model with its optimizer."""
    from relax_hpc.training.models.batches import collate

    batches = [collate(samples, 0, device) for samples in micro_batches]
    return lambda: trained.accumulate(batches), lambda: trained.step(1e-6)


def acts_without_optimizer(
    shape: str, micro_batches: MicroBatches, device: str, actor: Section
) -> Acts:
    """Our model without an optimizer and its float32 buffers. Gradients are in bfloat16 and are
    discarded."""
    from relax_hpc.training.models.batches import collate

    model = policy(shape, settings_of(actor, device), device)
    batches = [collate(samples, 0, device) for samples in micro_batches]

    def accumulate() -> None:
        for batch in batches:
            values, _ = model.logprobs(batch, 1.0)
            (-(values * batch.mask).sum() / batch.mask.sum()).backward()

    def step() -> None:
        for parameter in model.module.parameters():
            parameter.grad = None

    return accumulate, step


def build_peer(shape: str, device: str, liger: bool) -> Any:
    """The same model of transformers. ``liger``: with the fused layers of Liger."""
    install_transformers_hook()
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = hf_config(shape)
    config = AutoConfig.for_model(settings.pop("model_type"), **settings)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(device)
    model.train().config.use_cache = False
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=model)
    return model


def acts_of_peer(
    shape: str, micro_batches: MicroBatches, device: str, liger: bool, masters: bool
) -> Acts:
    """A model of transformers with AdamW. ``masters``: the optimizer has float32 copies of the
    weights."""
    model = build_peer(shape, device, liger)
    weights = list(model.parameters())
    optimized = [weight.detach().float() for weight in weights] if masters else weights
    optimizer = torch.optim.AdamW(optimized, lr=1e-6, fused=device == "cuda")
    ids = [
        torch.tensor([row["token_ids"].tolist() for row in samples], device=device)
        for samples in micro_batches
    ]

    def accumulate() -> None:
        for tokens in ids:
            (model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(ids)).backward()

    def step() -> None:
        if masters:
            for weight, master in zip(weights, optimized, strict=True):
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(optimized, 1.0)
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(weights, optimized)
        optimizer.zero_grad(set_to_none=True)

    return accumulate, step


def measure(
    device: str,
    shape: str,
    count: int,
    length: int,
    micro: int,
    who: str = "ours",
    actor: Section | None = None,
    liger: bool = False,
    masters: bool = False,
    steps: int = 4,
) -> dict[str, float]:
    """Seconds, memory and planned peak of a step of ``count`` rows of ``length`` tokens.

    ``micro``: largest number of tokens in a micro-batch.
    ``who``: `ours` with the section ``actor`` of a configuration; `alone`, the same without an
    optimizer; or `peer`.
    """
    spec = spec_from_config(hf_config(shape))
    samples = rows(count, length, spec.vocab)
    rows_per_batch = max(1, micro // length)
    starts = range(0, count, rows_per_batch)
    micro_batches = [samples[start : start + rows_per_batch] for start in starts]
    section = actor or {}
    trained = None
    if who == "ours":
        trained = trainer(shape, section, device)
        acts = acts_of_trainer(trained, micro_batches, device)
    elif who == "alone":
        acts = acts_without_optimizer(shape, micro_batches, device, section)
    else:
        acts = acts_of_peer(shape, micro_batches, device, liger, masters)
    flops = training_flops(spec, [length] * count)
    figures = time_steps(acts, steps, count * length, flops, device)
    if trained:
        if trained.model.compared_s:
            figures["compared_s"] = trained.model.compared_s
        figures["parameters"] = float(roles.parameters(spec, Config().actor.parallel, 0))
        settings = settings_of(section, device)
        figures["worked_out_gib"] = planned_gib(shape, length, micro, settings)
        figures["kernels_s"] = kernel_seconds(acts[0], device)
    return figures


def time_steps(acts: Acts, steps: int, tokens: int, flops: float, device: str) -> dict[str, float]:
    """Seconds and memory of a step with ``tokens`` tokens and ``flops`` operations.

    Seconds are medians of ``steps`` steps after the first one.
    """
    times = [time_step(*acts, device) for _ in range(steps + 1)]
    both_s, host_s, optimizer_s = (median(column) for column in zip(*times[1:], strict=True))
    step_s = both_s + optimizer_s
    figures = {
        "both_s": both_s,
        "host_s": host_s,
        "optimizer_s": optimizer_s,
        "tokens_per_s": tokens / step_s,
        "flops_of_step": flops / step_s,
        "flops_of_both": flops / both_s,
    }
    if device == "cuda":
        figures["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        peak = peak_flops(torch.cuda.get_device_name())
        if peak:
            figures["mfu_of_stated_peak"] = flops / step_s / peak
    return figures


def time_step(
    accumulate: Callable[[], object], step: Callable[[], object], device: str
) -> tuple[float, float, float]:
    """Seconds of forward and backward, seconds until the host has launched them, and seconds of the
    optimizer's step."""
    sync(device)
    started = time.perf_counter()
    accumulate()
    launched = time.perf_counter()
    sync(device)
    accumulated = time.perf_counter()
    step()
    sync(device)
    return accumulated - started, launched - started, time.perf_counter() - accumulated


def kernel_seconds(accumulate: Callable[[], object], device: str) -> float:
    """Seconds of kernels of the device in a forward and backward pass. On a CPU, of operations."""
    kinds = torch.profiler.ProfilerActivity
    activity = kinds.CUDA if device == "cuda" else kinds.CPU
    with torch.profiler.profile(activities=[activity]) as profile:
        accumulate()
        sync(device)
    attribute = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return sum(getattr(event, attribute) for event in profile.key_averages()) / 1e6


def planned_gib(shape: str, length: int, micro: int, actor: ActorConfig) -> float:
    """Peak in GiB that `relax-hpc plan` calculates, without the memory of the CUDA context."""
    config = Config(actor=actor)
    config.model.dtype, config.model.device = "bfloat16", "cuda"
    actor.max_tokens_per_micro_batch = micro
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = length // 8, length - length // 8
    footprint = roles.actor_footprint(config, spec_from_config(hf_config(shape)), "actor", 1)
    return (footprint.peak - roles.CONTEXT_BYTES) / 2**30


if __name__ == "__main__":
    answer(measure)
