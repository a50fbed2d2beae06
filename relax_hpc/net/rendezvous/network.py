"""Address and interface that a process of a group uses, so that nothing listens where it need
not."""

from __future__ import annotations

import ipaddress
import socket
import struct

import psutil

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.groups import group_of
from relax_hpc.config.schema import Config

LOOPBACK = "127.0.0.1"
_CREDENTIALS = struct.Struct("3i")


def interface_address(interface: str) -> str:
    """The IPv4 address of ``interface`` on this host. ConfigError, naming those that there are, if
    it has none."""
    found = _addresses()
    if interface not in found:
        raise ConfigError(
            f"site.interface: found {interface!r}, allowed on host {socket.gethostname()}: "
            f"{_listed(found)} "
            "(interfaces with an IPv4 address; groups.<name>.interface goes before site.interface)"
        )
    return found[interface]


def own_address(config: Config, group: str) -> str:
    """Address at which the run's other processes reach this one: loopback in the local layout, else
    its interface's.

    Without a configured interface it is the address of the host's own name. ConfigError if that is
    none which other hosts could reach.
    """
    if config.layout == "local":
        return LOOPBACK
    if interface := _interface(config, group):
        return interface_address(interface)
    host = socket.gethostname()
    address = _ipv4_of(host)
    if address and not ipaddress.ip_address(address).is_loopback:
        return address
    addresses = _addresses()
    if address:
        why = f"resolves to {address}, which other hosts cannot reach"
    elif six := _ipv6_of(host):
        why = f"resolves to the IPv6 address {six} alone; IPv4 is needed, IPv6 is not supported"
    else:
        why = "does not resolve"
    outside = [name for name, own in addresses.items() if not ipaddress.ip_address(own).is_loopback]
    if outside:
        advice = f"set it to the network between the nodes, here one of: {_listed(addresses)}"
    else:
        advice = "no interface of this host has an IPv4 address; give the nodes a network with IPv4"
    raise ConfigError(f"site.interface: found none, and the name of host {host} {why}; {advice}")


def _ipv4_of(host: str) -> str:
    """IPv4 address of ``host``; empty: it has none."""
    try:
        return socket.gethostbyname(host)
    except OSError:
        return ""


def _ipv6_of(host: str) -> str:
    """IPv6 address of ``host``; empty: it has none."""
    try:
        found = socket.getaddrinfo(host, None, socket.AF_INET6)
    except OSError:
        return ""
    return str(found[0][4][0]) if found else ""


def peer_user(connection: socket.socket) -> int:
    """The user whose process is at the other end of a unix socket, or listened there."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return _CREDENTIALS.unpack(found)[1]


def library_environment(config: Config, group: str) -> dict[str, str]:
    """Environment variables that keep gloo, NCCL's bootstrap, libfabric and Open MPI on the
    configured interface.

    UCX is left alone: it takes devices (mlx5_0:1), and an interface's name would keep it from RDMA;
    see site.env. Without an interface there are none: gloo then takes the address of the host's own
    name, as `own_address` does. What site.env or the group's env sets is left alone.
    """
    interface = _interface(config, group)
    if config.layout == "local" or not interface:
        return {}
    names = {
        "GLOO_SOCKET_IFNAME": interface,
        # Without "=" NCCL takes every interface whose name begins so.
        "NCCL_SOCKET_IFNAME": f"={interface}",
        # Of libfabric, which introduces MPICH's ranks.
        "FI_TCP_IFACE": interface,
        "OMPI_MCA_btl_tcp_if_include": interface,
        "OMPI_MCA_oob_tcp_if_include": interface,
    }
    chosen = config.site.env.keys() | group_of(config, group).env.keys()
    return {name: value for name, value in names.items() if name not in chosen}


def _interface(config: Config, group: str) -> str:
    return group_of(config, group).interface or config.site.interface


def _addresses() -> dict[str, str]:
    """Interface -> its first IPv4 address."""
    found: dict[str, str] = {}
    for name, addresses in psutil.net_if_addrs().items():
        for one in addresses:
            if one.family == socket.AF_INET:
                found.setdefault(name, one.address)
    return found


def _listed(found: dict[str, str]) -> str:
    return ", ".join(f"{name} ({address})" for name, address in sorted(found.items())) or "none"
