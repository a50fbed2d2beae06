"""Planes: ways for the bytes of a shard from one process to another, all behind the interface `Plane`.

`ShmPlane` within a node and `TcpPlane` between nodes are here. The plane that needs an optional package is not
imported: take it from its own module.
"""

from relax_hpc.transfer_queue.planes.plane import Descriptor, Plane, PlaneError
from relax_hpc.transfer_queue.planes.shm import ShmPlane
from relax_hpc.transfer_queue.planes.slab import Slab, SlabPool
from relax_hpc.transfer_queue.planes.tcp import TcpPlane

__all__ = ["Descriptor", "Plane", "PlaneError", "ShmPlane", "Slab", "SlabPool", "TcpPlane"]
