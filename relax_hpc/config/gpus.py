"""The GPUs that a configuration assigns to groups, and their vendor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from relax_hpc.base.machine.gpu_vendors import (
    VENDORS,
    GpuVendor,
    read_entries,
    select_vendor,
)
from relax_hpc.config.schema import Config, GroupConfig


class DeviceSetting(NamedTuple):
    """The setting of a group that assigns GPUs to it."""

    key: str
    """Name of the setting below `groups.NAME`."""
    value: str
    """Numbers of the GPUs, separated by commas, or UUIDs; empty: no setting."""

    @property
    def entries(self) -> list[str]:
        """Numbers or UUIDs of the GPUs."""
        return read_entries(self.value)


def gpu_vendor(config: Config) -> GpuVendor:
    """The vendor of the GPUs: that of the site, or that of this machine."""
    return select_vendor(config.site.gpu_vendor)


def device_setting(group: GroupConfig) -> DeviceSetting:
    """The setting that assigns GPUs to ``group``: `devices`, or a vendor's variable in `env`."""
    if group.devices:
        return DeviceSetting("devices", ",".join(map(str, group.devices)))
    for vendor in VENDORS.values():
        if vendor.visible_variable in group.env:
            variable = vendor.visible_variable
            return DeviceSetting(f"env.{variable}", group.env[variable])
    return DeviceSetting("devices", "")


def device_variables(config: Config, group: GroupConfig) -> dict[str, str]:
    """Variables that limit the processes of ``group`` to its `devices`; empty without them."""
    if not group.devices:
        return {}
    return {gpu_vendor(config).visible_variable: device_setting(group).value}


def describe_gpu_mismatch(
    vendor: GpuVendor,
    environment: Mapping[str, str],
    needed: int,
    setting: str,
    is_exact: bool,
) -> str:
    """Line about a variable in ``environment`` that leaves another number of GPUs than ``needed``;
    empty if the number fits, or if no variable limits the GPUs.

    ``setting``: where the needed number comes from. ``is_exact``: more GPUs are wrong too, because
    Slurm was asked for exactly this number.
    """
    visible = vendor.visible_gpus(environment)
    if visible is None:
        return ""
    count = len(visible.entries)
    if count == needed or (count > needed and not is_exact):
        return ""
    return (
        f"{visible.variable}: found {visible.value!r} ({count} GPUs), needed: {needed} "
        f"({setting}); remove options that divide GPUs (gpus-per-task, gpu-bind) from "
        "srun_options, and the variable from site.setup and env"
    )


def hidden_gpu_variables() -> dict[str, str]:
    """Variables that hide the GPUs of all vendors from a process."""
    return {vendor.visible_variable: "" for vendor in VENDORS.values()}
