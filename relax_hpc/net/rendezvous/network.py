"""Address and network interface of a group's processes, so that they listen on no other one."""

from __future__ import annotations

import ipaddress
import socket
import struct

import psutil

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.groups import group_settings
from relax_hpc.config.schema import Config

LOOPBACK = "127.0.0.1"
_CREDENTIALS = struct.Struct("3i")
"""struct ucred of Linux: pid, uid, gid."""


def interface_address(interface: str) -> str:
    """The IPv4 address of ``interface`` on this host. ConfigError, with all interfaces: it has
    none."""
    addresses = _addresses()
    if interface not in addresses:
        raise ConfigError(
            f"site.interface: found {interface!r}, allowed on host {socket.gethostname()}: "
            f"{_format(addresses)} "
            "(interfaces with an IPv4 address; groups.<name>.interface goes before site.interface)"
        )
    return addresses[interface]


def own_address(config: Config, group: str) -> str:
    """Address at which the run's other processes reach this one.

    It is loopback in the local layout, else the address of the configured interface, else the
    address of the host's name. ConfigError: other hosts cannot reach the address of the name.
    """
    if config.layout == "local":
        return LOOPBACK
    if interface := _interface(config, group):
        return interface_address(interface)
    host = socket.gethostname()
    address = _ipv4_of(host)
    # Debian maps the host's name to 127.0.1.1 in /etc/hosts, which other hosts cannot reach.
    if address and not ipaddress.ip_address(address).is_loopback:
        return address
    raise ConfigError(
        f"site.interface: found none, and the name of host {host} {_name_problem(host, address)}; "
        f"{_interface_advice()}"
    )


def _name_problem(host: str, address: str) -> str:
    """Reason why other hosts cannot reach ``host`` by its name. ``address``: its IPv4 address."""
    if address:
        return f"resolves to {address}, which other hosts cannot reach"
    if address_v6 := _ipv6_of(host):
        return (
            f"resolves to the IPv6 address {address_v6} alone; IPv4 is needed, IPv6 is not "
            "supported"
        )
    return "does not resolve"


def _interface_advice() -> str:
    addresses = _addresses()
    if all(ipaddress.ip_address(address).is_loopback for address in addresses.values()):
        return "no interface of this host has an IPv4 address; give the nodes a network with IPv4"
    return f"set it to the network between the nodes, here one of: {_format(addresses)}"


def _ipv4_of(host: str) -> str:
    """IPv4 address of ``host``; empty: it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _ipv6_of(host: str) -> str:
    """IPv6 address of ``host``; empty: it has none."""
    try:
        entries = socket.getaddrinfo(host, None, socket.AF_INET6)
    except OSError:
        return ""
    return str(entries[0][4][0]) if entries else ""


def peer_user(connection: socket.socket) -> int:
    """User id of the process at the other end of a unix socket, or of the one that listened."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(credentials)[1]


def library_environment(config: Config, group: str) -> dict[str, str]:
    """Environment variables that keep libraries on the configured interface.

    They are for gloo, NCCL's bootstrap, libfabric and Open MPI. Variables that site.env or the
    group's env sets are left out. Without a configured interface the result is empty; gloo then
    uses the address of the host's name, as `own_address` does.
    """
    interface = _interface(config, group)
    if config.layout == "local" or not interface:
        return {}
    # UCX is not among them: UCX_NET_DEVICES takes devices (mlx5_0:1), and the name of an interface
    # would turn off RDMA. Sites set it in site.env.
    names = {
        "GLOO_SOCKET_IFNAME": interface,
        # Without "=" NCCL uses every interface whose name has this prefix.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        # libfabric, by which the ranks of MPICH exchange their first messages.
        "FI_TCP_IFACE": interface,
        "OMPI_MCA_btl_tcp_if_include": interface,
        "OMPI_MCA_oob_tcp_if_include": interface,
    }
    chosen = config.site.env.keys() | group_settings(config, group).env.keys()
    return {name: value for name, value in names.items() if name not in chosen}


def _interface(config: Config, group: str) -> str:
    return group_settings(config, group).interface or config.site.interface


def _addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address."""
    first: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET:
                first.setdefault(name, address.address)
    return first


def _format(addresses: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in sorted(addresses.items())) or "none"
