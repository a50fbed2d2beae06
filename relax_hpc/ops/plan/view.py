"""`relax-hpc plan`: the memory of a run as a table or as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.ops.plan.footprint import GIB, Footprint, Sizes
from relax_hpc.ops.plan.model_memory import parameters
from relax_hpc.ops.plan.plan import USABLE, GpuSet, plan
from relax_hpc.training.models.expert_grouping import groups_experts
from relax_hpc.training.models.spec import ModelSpec

RESULTS = Path(__file__).parents[3] / "tools/bench/results"
"""Folder of benchmark results in a checkout of this code; an installation does not have it."""


def main(config: Config, spec: ModelSpec, as_json: bool) -> int:
    """Print the plan. Returns exit code 78 if a role does not fit, else 0.

    ConfigError: site.gpu_memory_gib is not set.
    """
    if not config.site.gpu_memory_gib:
        raise ConfigError(
            "site.gpu_memory_gib: found 0, allowed: the memory of a GPU in GiB, such as 79; set it "
            "to compare the plan with it"
        )
    gpu_sets = plan(config, spec)
    if as_json:
        print(json.dumps(_as_json(config, spec, gpu_sets), indent=1))
    else:
        print("\n".join(_lines(config, spec, gpu_sets)))
    return EXIT_CONFIG if any(gpu_set.lacks for gpu_set in gpu_sets) else EXIT_DONE


def basis(folder: Path = RESULTS) -> str:
    """A sentence that says how the plan was made, with measured peaks for comparison.

    `tools/gpu/check.sh --store` writes peaks of GPU runs to ``folder``.
    """
    source = "not measured: calculated with the formulas of docs/reference/memory.md"
    peaks = "; ".join(_measured_peaks(folder))
    if not peaks:
        return f"{source}; no peak of a GPU run of this code is stored"
    return f"{source}; peaks of GPU runs: {peaks}"


def _measured_peaks(folder: Path) -> Iterator[str]:
    """A text for each stored peak; results in another format are skipped."""
    for path in sorted(folder.glob("gpu-*.json")):
        try:
            result = read_json_object(path)
            machine = f"{result['machine']['device']}, commit {result['machine']['commit']}"
            for job, figures in result["measured"].items():
                if {"memory_gib", "worked_out_gib"} <= figures.keys():
                    peak, calculated = figures["memory_gib"], figures["worked_out_gib"]
                    yield f"{peak:.1f} GiB, calculated {calculated:.1f} ({job}; {machine})"
        except (ConfigError, ValueError, LookupError, AttributeError, TypeError):
            continue


def _lines(config: Config, spec: ModelSpec, gpu_sets: Sequence[GpuSet]) -> Iterator[str]:
    parts = [f"{spec.model_type}, {_millions(_parameters(spec))} parameters, {config.model.dtype}"]
    parts.append(f"{config.actor.kernels} kernels")
    if spec.experts:
        parts.append(f"{_experts(config, spec)} experts")
    parts.append(f"long_row_attention {config.model.long_row_attention}")
    if spec.towers:
        parts.append(f"tower_attention {config.model.tower_attention}")
    parts.append(f"warm_up {_on_or_off(config.actor.warm_up)}")
    parts.append(f"kernel_cache {_on_or_off(bool(config.site.kernel_cache))}")
    yield ", ".join(parts)
    yield "GiB on the fullest GPU of each role, in its worst phase"
    yield basis()
    if config.model.device != "cuda":
        yield f"model.device is {config.model.device}: the table is for a run on GPUs"
    for gpu_set in gpu_sets:
        for footprint in gpu_set.footprints:
            yield from _footprint_lines(footprint)
        yield ""
        yield from _verdict(gpu_set, config.site.gpu_memory_gib)


def _footprint_lines(footprint: Footprint) -> Iterator[str]:
    yield ""
    gpus = f"{footprint.gpus} GPU{'' if footprint.gpus == 1 else 's'}"
    yield f"{footprint.role}: {gpus}: {footprint.split}"
    for name, size in footprint.device_sizes.items():
        yield _line(name, size)
    phase = footprint.worst_phase
    yield _line(f"total, phase {phase}" if phase else "total", footprint.peak)
    if footprint.note:
        yield f"  {footprint.note}"
    yield f"  host memory per node: {_host(footprint)}"


def _millions(count: int) -> str:
    """A number of parameters with its unit.

    >>> _millions(8_190_735_360), _millions(596_049_920), _millions(131_456)
    ('8.19 G', '596 M', '0.131 M')
    """
    return f"{count / 1e9:.2f} G" if count >= 1e9 else f"{count / 1e6:.3g} M"


def _on_or_off(option: bool) -> str:
    return "on" if option else "off"


def _line(name: str, size: float) -> str:
    return f"  {name:<30}{size / GIB:8.2f}"


def _host(footprint: Footprint) -> str:
    """Host memory of a node in GiB, by purpose."""
    pinned = ", ".join(f"{name} {size / GIB:.1f}" for name, size in footprint.pinned.items())
    other = ", ".join(f"{name} {size / GIB:.1f}" for name, size in footprint.host.items())
    return "; ".join(filter(None, (pinned and f"pinned or shared: {pinned}", other)))


def _verdict(gpu_set: GpuSet, gpu_gib: float) -> Iterator[str]:
    """Whether the roles fit, and settings that would help, as options of the command line."""
    groups = " and ".join(gpu_set.groups)
    limit = f"{gpu_set.limit / GIB:.1f} GiB ({gpu_gib:g}, less {1 - USABLE:.0%} for fragmentation)"
    verdict = f"DOES NOT FIT ({'; '.join(gpu_set.lacks)})" if gpu_set.lacks else "fits"
    yield f"{groups}: {gpu_set.bytes / GIB:.1f} of {limit} on each GPU: {verdict}"
    if gpu_set.lacks and gpu_set.remedies:
        options = [f"--{remedy.replace(': ', '=', 1)}" for remedy in gpu_set.remedies]
        yield f"  it would fit with {' '.join(options)}"
    elif gpu_set.lacks:
        yield "  none of the tried settings helps; use more GPUs for this role, or shorter rows"


def _as_json(config: Config, spec: ModelSpec, gpu_sets: Sequence[GpuSet]) -> dict[str, Any]:
    return {
        "basis": basis(),
        "model": {
            "type": spec.model_type,
            "parameters": _parameters(spec),
            "dtype": config.model.dtype,
            "kernels": config.actor.kernels,
            "experts": _experts(config, spec),
            "long_row_attention": config.model.long_row_attention,
            "tower_attention": config.model.tower_attention,
            "warm_up": config.actor.warm_up,
            "kernel_cache": bool(config.site.kernel_cache),
        },
        "places": [
            {
                "groups": gpu_set.groups,
                "bytes": round(gpu_set.bytes),
                "limit": round(gpu_set.limit),
                "fits": not gpu_set.lacks,
                "lacks": gpu_set.lacks,
                "remedies": gpu_set.remedies,
                "roles": [_role_as_json(footprint) for footprint in gpu_set.footprints],
            }
            for gpu_set in gpu_sets
        ],
    }


def _role_as_json(footprint: Footprint) -> dict[str, Any]:
    return {
        "role": footprint.role,
        "group": footprint.group,
        "gpus": footprint.gpus,
        "resident": _rounded(footprint.resident),
        "moments": {name: _rounded(sizes) for name, sizes in footprint.phases.items()},
        "pinned_per_node": _rounded(footprint.pinned),
        "host_per_node": _rounded(footprint.host),
    }


def _experts(config: Config, spec: ModelSpec) -> str:
    """Value of `actor.experts` that `auto` stands for in this run."""
    actor = config.actor
    is_grouped = groups_experts(actor.experts, spec, config.model, actor.parallel)
    return "grouped" if is_grouped else "sequential"


def _rounded(sizes: Sizes) -> dict[str, int]:
    return {name: round(size) for name, size in sizes.items()}


def _parameters(spec: ModelSpec) -> int:
    return parameters(spec, ParallelConfig(), 0)
