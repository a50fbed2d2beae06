"""Transport planes for the bytes of records between processes, all with the interface `Plane`.

`ShmPlane` within a node and `TcpPlane` between nodes are exported here. `rdma.RdmaPlane` needs an
optional package and is not imported. `choice.make_planes` creates the planes of a configuration.
"""

from relax_hpc.net.transport.plane import Descriptor, Plane, PlaneError
from relax_hpc.net.transport.shm import ShmPlane
from relax_hpc.net.transport.slab import Slab, SlabPool
from relax_hpc.net.transport.tcp import TcpPlane

__all__ = ["Descriptor", "Plane", "PlaneError", "ShmPlane", "Slab", "SlabPool", "TcpPlane"]
