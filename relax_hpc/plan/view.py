"""`relax-hpc plan`: the memory of a run as a table, or for programs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.errors import EXIT_CONFIG, EXIT_DONE
from relax_hpc.models.spec import ModelSpec
from relax_hpc.plan.footprint import GIB, Footprint
from relax_hpc.plan.model_memory import parameters
from relax_hpc.plan.plan import Place, plan

BASIS = (
    "not measured: worked out by the formulas of docs/reference/memory.md; no peak of a GPU run of this code is stored"
)


def main(config: Config, spec: ModelSpec, as_json: bool) -> int:
    """Print the plan; 0, or 78 if anything does not fit."""
    places = plan(config, spec)
    print(json.dumps(_as_json(config, spec, places), indent=1) if as_json else "\n".join(_lines(config, spec, places)))
    return EXIT_CONFIG if any(place.lacks for place in places) else EXIT_DONE


def _lines(config: Config, spec: ModelSpec, places: Sequence[Place]) -> Iterator[str]:
    count = _parameters(spec)
    yield f"{spec.model_type}, {count / 1e9:.2f} G parameters, {config.model.dtype}; GiB; {BASIS}"
    for place in places:
        for one in place.footprints:
            yield ""
            yield f"{one.role} on {one.gpus} GPUs: {one.split}"
            yield from (_line(name, size) for name, size in one.device.items())
            if one.note:
                yield f"  {one.note}"
            yield f"  of a node's memory: {_host(one)}"
        yield ""
        taken = f"{place.bytes / GIB:.1f} of {place.limit / GIB:.1f} on each GPU"
        yield f"{' and '.join(place.groups)}: {taken}; {_verdict(place)}"


def _line(name: str, size: float) -> str:
    return f"  {name:<24}{size / GIB:8.2f}"


def _host(one: Footprint) -> str:
    pinned = ", ".join(f"{name} {size / GIB:.1f}" for name, size in one.pinned.items())
    other = ", ".join(f"{name} {size / GIB:.1f}" for name, size in one.host.items())
    return "; ".join(filter(None, (pinned and f"pinned or shared: {pinned}", other)))


def _verdict(place: Place) -> str:
    if not place.lacks:
        return "fits"
    mend = f"it would with {', '.join(place.remedies)}" if place.remedies else "more GPUs for this role may help"
    return f"DOES NOT FIT ({'; '.join(place.lacks)}): {mend}"


def _as_json(config: Config, spec: ModelSpec, places: Sequence[Place]) -> dict[str, Any]:
    return {
        "basis": BASIS,
        "model": {"type": spec.model_type, "parameters": _parameters(spec), "dtype": config.model.dtype},
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
