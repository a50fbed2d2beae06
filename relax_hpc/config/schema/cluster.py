"""Settings of the Slurm jobs and of the site."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_hpc.base.settings import bounded
from relax_hpc.config.roles import ROLES


@dataclass(kw_only=True, slots=True)
class ResourcesConfig:
    """Slurm resources of a group."""

    nodes: int = bounded(1, 1)
    gpus_per_node: int = bounded(0, 0)
    cpus_per_task: int = bounded(1, 1)
    """CPUs of each rank."""
    memory: str = ""
    """Memory of each node, as sbatch takes it (`64G`); `0`: all; empty: the partition's default."""
    time: str = ""
    """Time limit of the group's own job in the `jobs` layout; empty: slurm.time."""
    options: dict[str, str | None] = field(default_factory=dict)
    """Further sbatch options by their long names: `{constraint: h100, exclude: "node[1-2]"}`. null
    takes off an option that `site.options` or `site.gpu_options` sets."""


@dataclass(kw_only=True, slots=True)
class GroupConfig:
    """Processes that live and die together."""

    roles: list[Literal[tuple(ROLES)]] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    """Extra environment variables of its processes, such as CUDA_VISIBLE_DEVICES, which places a
    group on its GPUs."""
    code: str = ""
    """Folder with the package relax_hpc that its processes run, of the run's own protocol; empty:
    the run's code."""
    interface: str = ""
    """Network interface that its sockets and libraries use; empty: site.interface."""
    on_failure: Literal["restart", "resubmit", "stop_run"] = "restart"
    """Reaction to the group's failure. `restart`: in its allocation, or in a replacement job if
    that lost nodes; `resubmit`: always a new job."""
    spares: int = bounded(0, 0)
    """Held spare jobs, submitted up front, for sites whose compute nodes may not call sbatch."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """Slurm settings of the run as a whole."""

    time: str = "24:00:00"
    """Time limit as sbatch takes it."""
    signal_s: int = bounded(300, 30, 65535)
    """Seconds before the time limit at which the run saves and makes way; Slurm may be a minute
    early or late."""
    successors: int = bounded(20, 0)
    """Jobs that continue the run when its own ends early, one after the other; in the layout `jobs`
    when the hub's ends without being queued again, because its batch script was killed. Where nodes
    may not call sbatch, all are queued up front."""
    one_node_hub: bool = False
    """Allow a `het` job whose first component has one node: any node's death anywhere then ends the
    whole job."""


@dataclass(kw_only=True, slots=True)
class MpiConfig:
    """Rendezvous of the ranks of a group."""

    launcher: Literal["pmix", "pmi2", "mpiexec"] = "pmi2"
    """`srun --mpi` plugin; `mpiexec`: none, where every group has one rank. The local layout needs
    none either."""
    library: str = "wheel"
    """MPI library. `wheel`: the mpich wheel beside mpi4py (pairs with pmi2); else the path of a
    libmpi.so."""


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """A container around every role; supervision stays outside of it."""

    runtime: Literal["none", "apptainer", "pyxis"] = "none"
    program: str = "apptainer"
    """Program that starts a container with runtime `apptainer`: a name on PATH, such as
    `singularity`, or a path."""
    image: str = ""
    mounts: list[str] = field(default_factory=list)
    """Folders to mount: `/path` or `/path:/inside`; the run directory is always mounted."""
    python: str = "python3"
    """Interpreter inside the container."""


@dataclass(kw_only=True, slots=True)
class SiteConfig:
    """Facts of a cluster that are the same for all runs on it."""

    name: str = ""
    partition: str = ""
    hub_partition: str = ""
    """Partition of CPU nodes for the hub; empty: the same as the others'."""
    cpu_nodes: bool = True
    """Whether there are nodes without GPUs, for the hub. False: in a `het` job it rides on the
    group with the most nodes; in `jobs` its own job asks for one GPU, as every job must there."""
    account: str = ""
    qos: str = ""
    gpu_request: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    gpu_type: str = ""
    """GPU type, as in `gres/gpu:TYPE`."""
    gpu_memory_gib: float = bounded(79.0, 0.0, 4096.0)
    """Memory of one GPU in GiB, as torch finds it: 79 of an H100 or A100 of 80 GB, 39 of one of 40
    GB, 139 of an H200. What cannot fit by calculation is refused, see `relax-hpc plan`; 0: nothing
    is."""
    memory_request: Literal["mem", "none"] = "mem"
    """Option by which jobs ask for memory. `none`: memory follows from the CPUs, and the site takes
    no option for it; groups' `memory` is not asked for."""
    options: dict[str, str] = field(default_factory=dict)
    """Further sbatch options of every job by their long names, such as `reservation` or
    `mail-user`."""
    gpu_options: dict[str, str] = field(default_factory=dict)
    """Further sbatch options of the allocations with GPUs alone, such as `{constraint: a100}`."""
    srun_options: dict[str, str] = field(default_factory=dict)
    """Further srun options of every role by their long names, such as `{cpu-freq: high, mem-bind:
    local}`. With `cpu-bind` Slurm places the ranks on cores; else each takes cores of its own near
    its GPU. Slurm leaves `hint` out of account beside a binding, and every role has one: ask for it
    in site.options, for the job."""
    setup: list[str] = field(default_factory=list)
    """Lines of bash that every batch script runs first: `module purge`, `source /site/profile`,
    `ulimit -n 65536`. Roles and the standby supervisor inherit variables and limits (NOFILE,
    MEMLOCK, NPROC, STACK)."""
    modules: list[str] = field(default_factory=list)
    """Environment modules to load."""
    on_end: list[str] = field(default_factory=list)
    """Command that is called where the hub runs when the run has ended for good, such as
    `[/site/notify, me@there]`. It gets three more arguments: finished, stopped or failed, the run
    directory, and the reason. At most 30 s."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process, such as NCCL_IB_HCA or UCX_NET_DEVICES."""
    python: str = ""
    """Interpreter on the nodes that has relax_hpc; empty: the one that submits."""
    interface: str = ""
    """Network interface for sockets, gloo and NCCL's bootstrap; empty: that of the host's own
    name."""
    mpi: MpiConfig = field(default_factory=MpiConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    sbatch_on_nodes: bool = True
    """Whether compute nodes may call sbatch; false: replacements are held spare jobs, successors
    are queued up front."""
    local_dir: str = ""
    """Folder on each node's own disk for caches and staging; empty: $TMPDIR or /tmp."""
    stage: list[Literal["model", "environment"]] = field(default_factory=list)
    """Data copied to local_dir once a node instead of being read from the shared filesystem by
    every process: the model, the virtual or conda environment of the interpreter."""
