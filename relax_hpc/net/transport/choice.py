"""Choice of the planes of a process: those of the configuration that work here, the best first."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict

from relax_hpc.base.errors import ConfigError
from relax_hpc.config.schema import Config, Mode
from relax_hpc.net.transport.links import SILENCE_S
from relax_hpc.net.transport.plane import Plane, PlaneError
from relax_hpc.net.transport.shm import ShmPlane
from relax_hpc.net.transport.slab import SlabPool
from relax_hpc.net.transport.tcp import TcpPlane


def planes_wanted(config: Config) -> dict[str, Mode]:
    """The modes of `queue.planes`, by plane, the best first. On one node nothing is between
    nodes."""
    modes = asdict(config.queue.planes)
    if config.layout == "local" and modes["rdma"] == "auto":
        modes["rdma"] = "off"
    return modes


def make_planes(
    modes: Mapping[str, Mode],
    token: bytes,
    pool: SlabPool,
    host: str,
    owner: str,
    silence_s: float = SILENCE_S,
) -> tuple[dict[str, Plane], dict[str, str]]:
    """Planes by name, in the order of ``modes``; and, by name, why others that are not off cannot
    be had here.

    ``silence_s``: for a maker without any sign.
    """
    makers: dict[str, Callable[[], Plane]] = {
        "shm": lambda: ShmPlane(token, pool, silence_s),
        "rdma": lambda: _rdma(modes["rdma"], token, pool, owner),
        "tcp": lambda: TcpPlane(token, host, silence_s),
    }
    planes: dict[str, Plane] = {}
    absent: dict[str, str] = {}
    for name in [name for name, mode in modes.items() if mode != "off"]:
        try:
            planes[name] = makers[name]()
        except (PlaneError, OSError) as error:
            absent[name] = str(error)
    return planes, absent


def _rdma(mode: Mode, token: bytes, pool: SlabPool, owner: str) -> Plane:
    # NIXL takes half a second to load: not where it could only emulate, which plane tcp does
    # better.
    from relax_hpc.net.transport.rdma_path import has_active_card

    if mode == "auto" and not has_active_card():
        raise PlaneError("rdma: there is no InfiniBand card that NIXL knows")
    from relax_hpc.net.transport.rdma import RdmaPlane

    return RdmaPlane(token, pool, owner)


def check_required(config: Config) -> None:
    """ConfigError if a plane is required that this process cannot have. Cheap where none needs a
    package."""
    if config.queue.planes.rdma == "required":
        from relax_hpc.net.transport.rdma_agent import check_nixl

        usable, why = check_nixl()
        if not usable:
            raise ConfigError(missing_plane("rdma", why))


def missing_plane(name: str, why: str) -> str:
    """Message about a required plane that cannot be had."""
    return (
        f"queue.planes.{name}: found required, but {why.removeprefix(f'{name}: ')}; or set it "
        "to auto"
    )
