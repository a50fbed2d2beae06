"""The devices that an SGLang server takes, derived from its flags.

Written for SGLang 0.5.21. Its `server_args.compute_world_size` gives the number of devices, and
`data_parallel_controller.py` the device of each rank: the first one is `base_gpu_id`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_SIZES = ("tp_size", "pp_size", "dp_size", "dwdp_size")
"""Flags that count ranks of a server. `ep_size`, `moe_dp_size`, `attn_cp_size` and `dcp_size`
divide the ranks of `tp_size` and add none."""
_FIXED = {"nnodes": 1, "node_rank": 0, "gpu_id_step": 1}
"""Flags that move ranks to other devices -> the only value that is allowed."""


def devices_per_server(flags: Mapping[str, Any]) -> int:
    """Number of devices of one server with ``flags``. An invalid size counts as 1.

    Each copy of the model (`dp_size`) takes separate devices, except with data-parallel attention
    (`enable_dp_attention`, which `dwdp_size` implies): then the copies share the devices of
    `tp_size`.

    >>> devices_per_server({"tp_size": 2, "dp_size": 4})
    8
    >>> devices_per_server({"tp_size": 4, "dp_size": 4, "enable_dp_attention": True})
    4
    """
    devices = _size(flags, "tp_size") * _size(flags, "pp_size")
    if flags.get("enable_dp_attention") is True or _size(flags, "dwdp_size") > 1:
        return devices
    return devices * _size(flags, "dp_size")


def first_device(flags: Mapping[str, Any], index: int) -> int:
    """Number of the first device of the server ``index`` (from 0) of a node.

    ``flags`` may name the first device of the node's servers as `base_gpu_id`.
    """
    base = flags.get("base_gpu_id", 0)
    return (base if _is_integer(base, 0) else 0) + index * devices_per_server(flags)


def device_mistakes(section: str, flags: Mapping[str, Any]) -> Iterator[str]:
    """Mistakes in ``flags`` of ``section`` that hide which devices a server takes, one line
    each."""
    for name, minimum in {**dict.fromkeys(_SIZES, 1), "base_gpu_id": 0}.items():
        if name in flags and not _is_integer(flags[name], minimum):
            yield f"{section}.{name}: found {flags[name]!r}, allowed: an integer, {minimum} or more"
    if not isinstance(value := flags.get("enable_dp_attention", False), bool):
        yield f"{section}.enable_dp_attention: found {value!r}, allowed: true or false"
    for name, allowed in _FIXED.items():
        if flags.get(name, allowed) != allowed:
            yield (
                f"{section}.{name}: found {flags[name]!r}, allowed: {allowed}; a server takes "
                "adjacent devices of one node; leave out the flag"
            )


def _size(flags: Mapping[str, Any], name: str) -> int:
    value = flags.get(name, 1)
    return value if _is_integer(value, 1) else 1


def _is_integer(value: Any, minimum: int) -> bool:
    """Whether ``value`` is an integer (no boolean) of at least ``minimum``."""
    return type(value) is int and value >= minimum
