"""Settings of the HTTP service of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_hpc.base.settings import bounded
from relax_hpc.config.schema.autoscaler import AutoscalerConfig


@dataclass(kw_only=True, slots=True)
class ServiceConfig:
    """The HTTP service of a run, in the group of the hub: role `api`. It adds and removes engines,
    and shows what the run does. The address and the token are in RUN/service/api.json."""

    enabled: bool = True
    """Whether the run has the role `api`. Without it, `relax-hpc scale` and all pages and metrics
    of the service are missing."""
    address: Literal["loopback", "site"] = "loopback"
    """Interface of the service. `loopback`: only programs on the hub's node reach it, others by an
    ssh tunnel. `site`: on the interface of `site.interface`; every program in that network can
    connect, and needs the token. The connection is not encrypted."""
    port: int = bounded(0, 0, 65535)
    """Port of the service. With 0 a free port is chosen, and kept after a restart if it is still
    free."""
    max_body: int = bounded(1 << 20, 1024)
    """Largest body of a request in bytes."""
    min_engines: int = bounded(1, 1)
    """Smallest number of engines that operations of the service leave in the run."""
    max_engines: int = bounded(0, 0)
    """Largest number of engines that operations of the service give to the run. With 0 there is no
    limit."""
    scale_out_timeout_s: float = bounded(1800.0, 1.0)
    """Seconds until a scale-out whose request names no `timeout_secs` ends, with the engines that
    serve by then. The time of a job in Slurm's queue counts."""
    scale_in_timeout_s: float = bounded(300.0, 1.0)
    """Seconds until a scale-in whose request names no `timeout_secs` ends as failed."""
    autoscaler: AutoscalerConfig = field(default_factory=AutoscalerConfig)
