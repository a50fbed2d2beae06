"""The number of GPUs that a role needs, compared with those that it sees."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.gpus import describe_gpu_mismatch, device_setting, gpu_vendor
from relax_hpc.config.groups import group_settings, rank_count
from relax_hpc.config.roles import RANKED
from relax_hpc.config.schema import Config
from relax_hpc.net.rendezvous.affinity import engine_processes


def check_visible_gpus(
    config: Config, group: str, role: str, environment: Mapping[str, str] = os.environ
) -> None:
    """ConfigError if a variable leaves another number of GPUs to this process than its group has.

    Without the check a rank fails with an invalid device, or two ranks take the same GPU.
    """
    needed, setting = _needed_gpus(config, group, role)
    if config.model.device != "cuda" or not needed:
        return
    mismatch = describe_gpu_mismatch(
        gpu_vendor(config), environment, needed, setting, requests_gpus(config)
    )
    if mismatch:
        raise ConfigError(mismatch)


def requests_gpus(config: Config) -> bool:
    """Whether Slurm is asked for exactly the GPUs of each group."""
    return config.layout != "local" and config.site.gpu_request != "none"


def find_device_mistakes(config: Config) -> Iterator[str]:
    """A line for each group in layout `local` whose setting names too few GPUs for its roles."""
    for name, group in config.groups.items():
        setting = device_setting(group)
        for role in group.roles:
            needed, _ = _needed_gpus(config, name, role)
            if setting.value and len(setting.entries) < needed:
                yield (
                    f"groups.{name}.{setting.key}: found {setting.value!r} "
                    f"({len(setting.entries)} GPUs), needed: {needed} for {role}; name more, or "
                    "lower its ranks or engines"
                )


def _needed_gpus(config: Config, group: str, role: str) -> tuple[int, str]:
    """Number of GPUs that a process of ``role`` has to see, and the settings that it follows
    from."""
    if config.layout != "local":
        needed = group_settings(config, group).resources.gpus_per_node
        return needed, f"groups.{group}.resources.gpus_per_node"
    ranks = rank_count(config, group, role)
    if role in RANKED:
        return ranks, f"ranks of {role}"
    is_sglang = config.rollout.engine.kind == "sglang" or role == "genrm"
    if role in ("rollout", "genrm") and is_sglang:
        return ranks * engine_processes(config, role, ranks), f"devices of the engines of {role}"
    return 0, ""
