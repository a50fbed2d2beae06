"""What an optimizer step costs, ours or transformers': random weights and tokens, medians of the
steps after the first.

MFU is of what the model needs (relax_hpc.training.models.flops). The peers' loss is plain cross
entropy: no entropy, no ratios; those with float32 masters keep what ours keeps, the others bfloat16
alone.
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
    from relax_hpc.training.trainer import Trainer

Acts = tuple[Callable[[], object], Callable[[], object]]
"""Forward and backward of all micro-batches, and the optimizer's step."""
Parts = list[list[dict[str, Any]]]
"""Rows of each micro-batch."""


def ours(trained: Trainer, parts: Parts, device: str) -> Acts:
    from relax_hpc.training.models.batches import collate

    batches = [collate(part, 0, device) for part in parts]
    return lambda: trained.accumulate(batches), lambda: trained.step(1e-6)


def alone(shape: str, parts: Parts, device: str, actor: dict[str, Any]) -> Acts:
    """Our model without an optimizer and its float32 buffers: gradients in bfloat16, which are
    thrown away."""
    from relax_hpc.training.models.batches import collate

    model = policy(shape, settings_of(actor, device), device)
    batches = [collate(part, 0, device) for part in parts]

    def accumulate() -> None:
        for batch in batches:
            values, _ = model.logprobs(batch, 1.0)
            (-(values * batch.mask).sum() / batch.mask.sum()).backward()

    def step() -> None:
        for parameter in model.module.parameters():
            parameter.grad = None

    return accumulate, step


def peer(shape: str, parts: Parts, device: str, liger: bool, masters: bool) -> Acts:
    install_transformers_hook()
    from transformers import AutoConfig, AutoModelForCausalLM

    about = hf_config(shape)
    config = AutoConfig.for_model(about.pop("model_type"), **about)
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.bfloat16, attn_implementation="sdpa"
    ).to(device)
    model.train().config.use_cache = False
    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3

        apply_liger_kernel_to_qwen3(model=model)
    live = list(model.parameters())
    kept = [one.detach().float() for one in live] if masters else live
    optimizer = torch.optim.AdamW(kept, lr=1e-6, fused=device == "cuda")
    ids = [
        torch.tensor([row["token_ids"].tolist() for row in part], device=device) for part in parts
    ]

    def accumulate() -> None:
        for tokens in ids:
            (model(input_ids=tokens, labels=tokens, use_cache=False).loss / len(ids)).backward()

    def step() -> None:
        for one, master in zip(live, kept, strict=True) if masters else ():
            master.grad, one.grad = one.grad.float(), None
        torch.nn.utils.clip_grad_norm_(kept, 1.0)
        optimizer.step()
        if masters:
            with torch.no_grad():
                torch._foreach_copy_(live, kept)
        optimizer.zero_grad(set_to_none=True)

    return accumulate, step


def measure(
    device: str,
    shape: str,
    count: int,
    length: int,
    micro: int,
    who: str = "ours",
    actor: dict[str, Any] | None = None,
    liger: bool = False,
    masters: bool = False,
    steps: int = 4,
) -> dict[str, float]:
    """Of ``count`` rows of ``length`` tokens, in micro-batches of ``micro``: seconds of a step's
    parts, the most memory that was allocated, and the calculated peak. ``who``: ours, with
    the section ``actor`` of a configuration; alone; or peer."""
    spec = spec_from_config(hf_config(shape))
    samples, each = rows(count, length, spec.vocab), max(1, micro // length)
    parts = [samples[at : at + each] for at in range(0, count, each)]
    trained = trainer(shape, actor or {}, device) if who == "ours" else None
    if trained:
        acts = ours(trained, parts, device)
    else:
        acts = (
            alone(shape, parts, device, actor or {})
            if who == "alone"
            else peer(shape, parts, device, liger, masters)
        )
    times = [timed_parts(*acts, device) for _ in range(steps + 1)]
    both, host, optimizer = (median(column) for column in zip(*times[1:], strict=True))
    flops = training_flops(spec, [length] * count)
    found = {
        "both_s": both,
        "host_s": host,
        "optimizer_s": optimizer,
        "tokens_per_s": count * length / (both + optimizer),
    }
    found |= {"flops_of_step": flops / (both + optimizer), "flops_of_both": flops / both}
    if device == "cuda":
        found["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        if peak := peak_flops(torch.cuda.get_device_name()):
            found["mfu_of_stated_peak"] = flops / (both + optimizer) / peak
    if trained:
        if trained.model.compared_s:
            found["compared_s"] = trained.model.compared_s
        found["parameters"] = float(roles.parameters(spec, Config().actor.parallel, 0))
        found["worked_out_gib"] = worked_out(shape, length, micro, settings_of(actor or {}, device))
        found["kernels_s"] = kernel_seconds(acts[0], device)
    return found


def timed_parts(
    accumulate: Callable[[], object], step: Callable[[], object], device: str
) -> list[float]:
    """Seconds of forward and backward, until the host is through with it, and of the optimizer."""
    sync(device)
    marks = [time.perf_counter()]
    accumulate()
    marks.append(time.perf_counter())
    sync(device)
    marks.append(time.perf_counter())
    step()
    sync(device)
    marks.append(time.perf_counter())
    return [marks[2] - marks[0], marks[1] - marks[0], marks[3] - marks[2]]


def kernel_seconds(accumulate: Callable[[], object], device: str) -> float:
    """That the device is at work for one forward and backward pass; on a CPU, what operations
    take."""
    kinds = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[kinds.CUDA if device == "cuda" else kinds.CPU]) as seen:
        accumulate()
        sync(device)
    attribute = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return sum(getattr(event, attribute) for event in seen.key_averages()) / 1e6


def worked_out(shape: str, length: int, micro: int, actor: ActorConfig) -> float:
    """GiB that `relax-hpc plan` says, without what CUDA itself takes."""
    config = Config(actor=actor)
    config.model.dtype, config.model.device = "bfloat16", "cuda"
    actor.max_tokens_per_micro_batch = micro
    config.data.max_prompt_tokens, config.rollout.max_new_tokens = length // 8, length - length // 8
    return (
        roles.actor_footprint(config, spec_from_config(hf_config(shape)), "actor", 1).peak
        - roles.CONTEXT_BYTES
    ) / 2**30


if __name__ == "__main__":
    answer(measure)
