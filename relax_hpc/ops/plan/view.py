"""`relax-hpc plan`: the memory of a run as a table, or for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_DONE, ConfigError
from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.ops.plan.footprint import GIB, Footprint
from relax_hpc.ops.plan.model_memory import parameters
from relax_hpc.ops.plan.peaks import basis
from relax_hpc.ops.plan.plan import USABLE, Place, plan
from relax_hpc.training.models.spec import ModelSpec


def main(config: Config, spec: ModelSpec, as_json: bool) -> int:
    """Print the plan; 0, or 78 if anything does not fit. ConfigError: nobody said how much memory a
    GPU has."""
    if not config.site.gpu_memory_gib:
        raise ConfigError(
            "site.gpu_memory_gib: found 0, with which nothing is compared; say how much a GPU has, "
            "as 79"
        )
    places = plan(config, spec)
    print(
        json.dumps(_as_json(config, spec, places), indent=1)
        if as_json
        else "\n".join(_lines(config, spec, places))
    )
    return EXIT_CONFIG if any(place.lacks for place in places) else EXIT_DONE


def _lines(config: Config, spec: ModelSpec, places: Sequence[Place]) -> Iterator[str]:
    yield f"{spec.model_type}, {_count(_parameters(spec))} parameters, {config.model.dtype}"
    yield "GiB on one GPU of each role, the one with the most, at the moment that takes most"
    yield basis()
    if config.model.device != "cuda":
        yield f"model.device is {config.model.device}: this is what it would take on GPUs"
    for place in places:
        for one in place.footprints:
            yield ""
            yield f"{one.role}: {_plural(one.gpus, 'GPU')}: {one.split}"
            yield from (_line(name, size) for name, size in one.device.items())
            yield _line(f"together, in the {one.worst}" if one.worst else "together", one.peak)
            if one.note:
                yield f"  {one.note}"
            yield f"  of a node's memory: {_host(one)}"
        yield ""
        yield from _verdict(place, config.site.gpu_memory_gib)


def _count(parameters: int) -> str:
    """
    >>> _count(8_190_735_360), _count(596_049_920), _count(131_456)
    ('8.19 G', '596 M', '0.131 M')
    """
    return f"{parameters / 1e9:.2f} G" if parameters >= 1e9 else f"{parameters / 1e6:.3g} M"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _line(name: str, size: float) -> str:
    return f"  {name:<30}{size / GIB:8.2f}"


def _host(one: Footprint) -> str:
    pinned = ", ".join(f"{name} {size / GIB:.1f}" for name, size in one.pinned.items())
    other = ", ".join(f"{name} {size / GIB:.1f}" for name, size in one.host.items())
    return "; ".join(filter(None, (pinned and f"pinned or shared: {pinned}", other)))


def _verdict(place: Place, gpu_gib: float) -> Iterator[str]:
    """Lines for people; settings as they are given on the command line."""
    shared = " and ".join(place.groups)
    left = f"of {place.limit / GIB:.1f} ({gpu_gib:g}, less {1 - USABLE:.0%} for fragmentation)"
    said = f"DOES NOT FIT ({'; '.join(place.lacks)})" if place.lacks else "fits"
    yield f"{shared}: {place.bytes / GIB:.1f} {left} on each GPU: {said}"
    if place.lacks and place.remedies:
        yield "  it would with " + " ".join(
            f"--{one.replace(': ', '=', 1)}" for one in place.remedies
        )
    elif place.lacks:
        yield (
            "  no setting that was tried makes it fit: more GPUs for this role, or shorter "
            "rows, may"
        )


def _as_json(config: Config, spec: ModelSpec, places: Sequence[Place]) -> dict[str, Any]:
    return {
        "basis": basis(),
        "model": {
            "type": spec.model_type,
            "parameters": _parameters(spec),
            "dtype": config.model.dtype,
        },
        "places": [
            {
                "groups": place.groups,
                "bytes": round(place.bytes),
                "limit": round(place.limit),
                "fits": not place.lacks,
                "lacks": place.lacks,
                "remedies": place.remedies,
                "roles": [_role(one) for one in place.footprints],
            }
            for place in places
        ],
    }


def _role(one: Footprint) -> dict[str, Any]:
    def whole(parts: Any) -> dict[str, int]:
        return {name: round(size) for name, size in parts.items()}

    return {
        "role": one.role,
        "group": one.group,
        "gpus": one.gpus,
        "resident": whole(one.resident),
        "moments": {name: whole(parts) for name, parts in one.moments.items()},
        "pinned_per_node": whole(one.pinned),
        "host_per_node": whole(one.host),
    }


def _parameters(spec: ModelSpec) -> int:
    return parameters(spec, ParallelConfig(), 0)
