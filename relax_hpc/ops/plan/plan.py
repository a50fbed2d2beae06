"""Memory of a whole run: the roles on each set of GPUs, and settings with which they would fit."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object
from relax_hpc.base.model_sizes import weights_bytes
from relax_hpc.config.gpus import device_setting
from relax_hpc.config.groups import rank_count
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config, ParallelConfig
from relax_hpc.ops.plan import roles
from relax_hpc.ops.plan.footprint import GIB, Footprint
from relax_hpc.ops.plan.model_memory import ITEM_BYTES, parameters
from relax_hpc.ops.plan.remedies import remedies
from relax_hpc.training.models.families import spec_from_config
from relax_hpc.training.models.spec import ModelSpec

USABLE = 0.97
"""Share of a GPU's memory that the plan uses. The rest allows for fragmentation, an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSet:
    """GPUs with the same roles on each of them."""

    groups: tuple[str, ...]
    footprints: tuple[Footprint, ...]
    bytes: float
    """Bytes on a GPU in the worst case."""
    limit: float
    remedies: tuple[str, ...] = ()
    """Settings with which the roles would fit, all of them together.

    Empty if they fit, or if no such settings were found.
    """

    @property
    def lacks(self) -> list[str]:
        """Reasons why its roles cannot work, one line each."""
        lacks = [f"{item.role}: {item.lack}" for item in self.footprints if item.lack]
        if self.bytes > self.limit:
            names = " and ".join(item.role for item in self.footprints)
            lacks.append(f"{names}: {self.bytes / GIB:.1f} GiB on a GPU of {self.limit / GIB:.1f}")
        return lacks


def plan(config: Config, spec: ModelSpec) -> list[GpuSet]:
    """All sets of GPUs of a run whose policy has the model of ``spec``."""
    return [
        _with_remedies(config, spec, gpu_set) if gpu_set.lacks else gpu_set
        for gpu_set in _gpu_sets(config, spec)
    ]


def _with_remedies(config: Config, spec: ModelSpec, gpu_set: GpuSet) -> GpuSet:
    names = [footprint.role for footprint in gpu_set.footprints]

    def fits(changed: Config) -> bool:
        for role in RANKED:
            if role in names and any(spec.split_errors(getattr(changed, role).parallel)):
                return False
        same_groups = (item for item in _gpu_sets(changed, spec) if item.groups == gpu_set.groups)
        return not any(item.lacks for item in same_groups)

    settings = remedies(copy.deepcopy(config), spec, names, fits)
    return replace(gpu_set, remedies=tuple(settings))


def _gpu_sets(config: Config, spec: ModelSpec) -> Iterator[GpuSet]:
    limit = config.site.gpu_memory_gib * GIB
    groups_by_gpus = dict[str, list[str]]()
    for name, group in config.groups.items():
        # In layout `local` groups share all GPUs of the machine, unless the environment selects
        # some of them.
        is_local = config.layout == "local"
        gpus = device_setting(group).value if is_local else name
        groups_by_gpus.setdefault(gpus, []).append(name)
    for names in groups_by_gpus.values():
        footprints = list[Footprint]()
        for name in names:
            footprints += _footprints(config, spec, name, limit)
        if footprints:
            yield GpuSet(
                groups=tuple(names),
                footprints=tuple(footprints),
                bytes=_sum_peaks(config, footprints),
                limit=USABLE * limit,
            )


def _footprints(config: Config, spec: ModelSpec, group: str, limit: float) -> Iterator[Footprint]:
    """Footprints of the roles of ``group`` that use GPUs."""
    nodes = 1 if config.layout == "local" else config.groups[group].resources.nodes
    for role in config.groups[group].roles:
        per_node = -(-rank_count(config, group, role) // nodes)
        if role == "actor":
            yield roles.actor_footprint(config, spec, group, per_node)
        elif role == "critic":
            model = own_spec(config, role, spec)
            yield roles.critic_footprint(config, model, group, per_node)
        elif role in RANKED:
            model = own_spec(config, role, spec)
            yield roles.forward_footprint(config, model, role, group, per_node)
        elif role == "genrm":
            servers = -(-config.genrm.replicas // nodes)
            weights = _genrm_bytes(config)
            yield roles.genrm_footprint(config, weights, group, servers, limit)
        elif role == "rollout" and config.rollout.engine.kind == "sglang":
            engines = -(-config.rollout.replicas // nodes)
            yield roles.engine_footprint(config, spec, group, engines, limit)


def own_spec(config: Config, role: str, policy: ModelSpec) -> ModelSpec:
    """Spec of the model of ``role``: that of the policy, unless the role has another model.

    ConfigError: its config.json has a mistake.
    """
    key = f"{role}_path"
    directory = getattr(config.model, key, "")
    return _spec_in(directory, f"model.{key}", config.model.ignore_keys) if directory else policy


def _genrm_bytes(config: Config) -> float:
    """Bytes of the weights of the generative reward model.

    It is the size of the files. If there is only a config.json, the size is calculated for
    families that can be trained, and 0 for others.
    """
    path = config.genrm.path
    nbytes = weights_bytes(path) if path else 0
    if nbytes:
        return nbytes
    try:
        spec = _spec_in(path, "genrm.path", config.model.ignore_keys)
    except ConfigError:
        return 0.0
    item_bytes = ITEM_BYTES[config.genrm.dtype or config.model.dtype]
    return parameters(spec, ParallelConfig(), 0) * item_bytes


def _spec_in(directory: str, key: str, ignore_keys: list[str]) -> ModelSpec:
    """Spec of the model in ``directory``, which setting ``key`` names.

    ConfigError: its config.json has a mistake.
    """
    try:
        hf_config = read_json_object(Path(directory) / "config.json")
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error
    return spec_from_config(hf_config, ignore_keys)


def _sum_peaks(config: Config, footprints: list[Footprint]) -> float:
    """Bytes on a GPU in the worst case.

    The peaks of all roles are added. Colocated engines and actor take turns: the idle one keeps
    only its CUDA context on the GPU.
    """
    total = sum(footprint.peak for footprint in footprints)
    turns = [item.peak for item in footprints if item.role in ("rollout", "actor")]
    if not config.colocate or len(turns) < 2:
        return total
    return total - min(turns) + roles.CONTEXT_BYTES
