"""Choice of the planes of a process: those of the configuration that work here, best first."""

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
    """The mode of each plane in `queue.planes`, best plane first. On one node, `auto` turns plane
    rdma off."""
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
    """Planes by name, in the order of ``modes``; and the reasons why others are not available.

    ``silence_s``: seconds without data after which a read from a silent peer fails.
    """
    makers: dict[str, Callable[[], Plane]] = {
        "shm": lambda: ShmPlane(token, pool, silence_s),
        "rdma": lambda: _rdma(modes["rdma"], token, pool, owner),
        "tcp": lambda: TcpPlane(token, host, silence_s),
    }
    planes: dict[str, Plane] = {}
    absent: dict[str, str] = {}
    # A plane that is `required` but not available is reported by the caller, with all reasons.
    for name in [name for name, mode in modes.items() if mode != "off"]:
        try:
            planes[name] = makers[name]()
        except (PlaneError, OSError) as error:
            absent[name] = str(error)
    return planes, absent


def _rdma(mode: Mode, token: bytes, pool: SlabPool, owner: str) -> Plane:
    # Loading NIXL 1.5.1 takes half a second. Without a card it could only emulate reads over TCP,
    # which plane tcp does better.
    from relax_hpc.net.transport.rdma_path import has_active_card

    if mode == "auto" and not has_active_card():
        raise PlaneError("rdma: there is no InfiniBand card that NIXL knows")
    from relax_hpc.net.transport.rdma import RdmaPlane

    return RdmaPlane(token, pool, owner)


def check_required(config: Config) -> None:
    """Raise ConfigError if a required plane is not available in this process.

    Only plane rdma needs a package, which is loaded if it is required.
    """
    if config.queue.planes.rdma == "required":
        from relax_hpc.net.transport.rdma_agent import check_nixl

        usable, reason = check_nixl()
        if not usable:
            raise ConfigError(missing_plane("rdma", reason))


def missing_plane(name: str, reason: str) -> str:
    """Message about a required plane that is not available, for ``reason``."""
    return (
        f"queue.planes.{name}: found required, but {reason.removeprefix(f'{name}: ')}; or set it "
        "to auto"
    )
