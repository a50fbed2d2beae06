"""The memory of a whole run: roles by the GPUs that they share, and what would make them fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.model_sizes import weights_bytes
from relax_hpc.config.groups import ranks_of
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.ops.plan import roles
from relax_hpc.ops.plan.footprint import GIB, Footprint
from relax_hpc.ops.plan.model_memory import ITEM_BYTES, parameters
from relax_hpc.ops.plan.remedies import remedies
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.spec import ModelSpec

USABLE = 0.97
"""Share of a GPU's memory that is used; the rest is left to fragmentation. An assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """GPUs, all with the same roles on them."""

    groups: tuple[str, ...]
    footprints: tuple[Footprint, ...]
    bytes: float
    """Bytes on a GPU at the worst time."""
    limit: float
    remedies: tuple[str, ...] = ()
    """Settings with which it would fit, all of them together; none where it does, or where none was
    found."""

    @property
    def lacks(self) -> list[str]:
        """Reasons why its roles cannot work, one line each; empty: they can."""
        found = [f"{one.role}: {one.lack}" for one in self.footprints if one.lack]
        if self.bytes > self.limit:
            names = " and ".join(one.role for one in self.footprints)
            found.append(f"{names}: {self.bytes / GIB:.1f} GiB on a GPU of {self.limit / GIB:.1f}")
        return found


def plan(config: Config, spec: ModelSpec) -> list[Place]:
    """Every place of a run on GPUs whose roles have the model of ``spec``."""
    places = list(_places(config, spec))
    return [place if not place.lacks else _mended(config, spec, place) for place in places]


def _mended(config: Config, spec: ModelSpec, place: Place) -> Place:
    names = [one.role for one in place.footprints]

    def fits(other: Config) -> bool:
        cuts = [getattr(other, role).parallel for role in RANKED if role in names]
        if any(any(spec.split_errors(cut)) for cut in cuts):
            return False
        return all(not one.lacks for one in _places(other, spec) if one.groups == place.groups)

    found = remedies(copy.deepcopy(config), spec, names, fits)
    return Place(
        groups=place.groups,
        footprints=place.footprints,
        bytes=place.bytes,
        limit=place.limit,
        remedies=tuple(found),
    )


def _places(config: Config, spec: ModelSpec) -> Iterator[Place]:
    limit, shared = config.site.gpu_memory_gib * GIB, dict[str, list[str]]()
    for name, group in config.groups.items():
        # On one machine groups see all GPUs, or those that they are given.
        seen = group.env.get("CUDA_VISIBLE_DEVICES", "") if config.layout == "local" else name
        shared.setdefault(seen, []).append(name)
    for names in shared.values():
        found = [one for name in names for one in _footprints(config, spec, name, limit)]
        if found:
            total = _together(config, found)
            yield Place(
                groups=tuple(names), footprints=tuple(found), bytes=total, limit=USABLE * limit
            )


def _footprints(config: Config, spec: ModelSpec, group: str, limit: float) -> Iterator[Footprint]:
    nodes = 1 if config.layout == "local" else config.groups[group].resources.nodes
    for role in config.groups[group].roles:
        per_node = -(-ranks_of(config, group, role) // nodes)
        if role == "actor":
            yield roles.actor(config, spec, group, per_node)
        elif role == "critic":
            yield roles.critic(config, own_spec(config, role, spec), group, per_node)
        elif role in RANKED:
            yield roles.forward(config, own_spec(config, role, spec), role, group, per_node)
        elif role == "genrm":
            yield roles.judge(
                config, _judge_bytes(config), group, -(-config.genrm.replicas // nodes), limit
            )
        elif role == "rollout" and config.rollout.engine.kind == "sglang":
            yield roles.engine(config, spec, group, -(-config.rollout.replicas // nodes), limit)


def own_spec(config: Config, role: str, policy: ModelSpec) -> ModelSpec:
    """Spec of the model that ``role`` has, the policy's if no other is named. ConfigError: it is
    not in order."""
    key = f"{role}_path"
    directory = getattr(config.model, key, "")
    return _spec_in(directory, f"model.{key}", config.model.ignore_keys) if directory else policy


def _judge_bytes(config: Config) -> float:
    """Bytes of the weights of a generative reward model: of its files or, where there is its
    config.json alone, as many as that says, if the model is of a family that can be trained too;
    else 0."""
    if found := config.genrm.path and weights_bytes(config.genrm.path):
        return found
    try:
        spec = _spec_in(config.genrm.path, "genrm.path", config.model.ignore_keys)
    except ConfigError:
        return 0.0
    return (
        parameters(spec, ParallelConfig(), 0) * ITEM_BYTES[config.genrm.dtype or config.model.dtype]
    )


def _spec_in(directory: str, key: str, ignore_keys: list[str]) -> ModelSpec:
    """Spec of the model in ``directory``, which ``key`` names. ConfigError: it is not in order."""
    try:
        hf_config = read_json_object(Path(directory) / "config.json")
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return spec_from_config(hf_config, ignore_keys)


def _together(config: Config, found: list[Footprint]) -> float:
    """Bytes at the worst time: of all at once, but engines and an actor that take turns leave each
    other all but their contexts."""
    everybody = sum(one.peak for one in found)
    turns = [one.peak for one in found if one.role in ("rollout", "actor")]
    if not config.colocate or len(turns) < 2:
        return everybody
    return everybody - min(turns) + roles.CONTEXT_BYTES
