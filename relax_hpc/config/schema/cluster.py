"""Settings of the Slurm jobs and of the site."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from relax_hpc.base.machine.gpu_vendors import VENDORS
from relax_hpc.base.settings import bounded
from relax_hpc.config.roles import ROLES


@dataclass(kw_only=True, slots=True)
class ResourcesConfig:
    """Slurm resources of a group."""

    nodes: int = bounded(1, 1)
    """Number of nodes."""
    gpus_per_node: int = bounded(0, 0)
    """Number of GPUs on each node."""
    cpus_per_task: int = bounded(1, 1)
    """Number of CPUs of each rank."""
    memory: str = ""
    """Memory of each node, as sbatch takes it (`64G`). `0` means all memory of the node. If it is
    empty, the partition's default applies."""
    time: str = ""
    """Time limit of the group's own job in the layout `jobs`. If it is empty, slurm.time
    applies."""
    options: dict[str, str | None] = field(default_factory=dict)
    """sbatch options of the group's jobs by their long names: `{constraint: h100, exclude:
    "node[1-2]"}`. They replace options of the site and those that relax_hpc writes; null removes an
    option."""
    srun_options: dict[str, str | None] = field(default_factory=dict)
    """srun options of the group's steps by their long names. They replace options of the site and
    those that relax_hpc writes; null removes an option."""


@dataclass(kw_only=True, slots=True)
class GroupConfig:
    """Processes that start and stop together."""

    # The names are known only at run time, when the loader checks them.
    roles: list[Literal[tuple(ROLES)]] = field(default_factory=list)  # type: ignore[valid-type]
    """Roles that run in this group."""
    env: dict[str, str] = field(default_factory=dict)
    """Additional environment variables of the group's processes."""
    devices: list[int] = field(default_factory=list)
    """Numbers of the GPUs of the group in layout `local`, such as `[0, 1]`. If it is empty, the
    group sees all GPUs of the machine. In other layouts Slurm assigns GPUs to groups."""
    code: str = ""
    """Folder that contains the package relax_hpc that the group's processes run. Its protocol must
    be the protocol of the run. If it is empty, they run the code of the run."""
    interface: str = ""
    """Network interface that the group's sockets and libraries use. If it is empty, site.interface
    applies."""
    on_failure: Literal["restart", "resubmit", "stop_run"] = "restart"
    """Reaction to a failure of the group. `restart`: restart it in its allocation, or in a new job
    if the allocation lost nodes. `resubmit`: always submit a new job. `stop_run`: stop the run."""
    spares: int = bounded(0, 0)
    """Number of spare jobs that are submitted on hold when the run starts, for sites whose compute
    nodes may not call sbatch."""
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)


@dataclass(kw_only=True, slots=True)
class SlurmConfig:
    """Slurm settings of the run as a whole."""

    time: str = "24:00:00"
    """Time limit as sbatch takes it."""
    signal_s: int = bounded(300, 30, 65535)
    """Seconds before the time limit at which the run saves and stops. Slurm may signal a minute
    early or late."""
    successors: int = bounded(20, 0)
    """Number of jobs that may continue the run, one after the other, when its own job ends early.
    In the layout `jobs` a successor starts when the hub's job ends without being requeued because
    its batch script was killed. If nodes may not call sbatch, all successors are submitted when the
    run starts."""
    one_node_hub: bool = False
    """Allow a `het` job whose first component has one node. The death of any node then ends the
    whole job."""


@dataclass(kw_only=True, slots=True)
class MpiConfig:
    """Rendezvous of the ranks of a group."""

    launcher: str = "pmi2"
    """Plugin of `srun --mpi`: `pmi2`, `pmix`, or another one of the site such as `cray_shasta`.
    `mpiexec` uses no plugin and requires that every group has one rank.
    The layout `local` uses no plugin either."""
    library: str = "wheel"
    """MPI library. `wheel`: the mpich wheel that is installed with mpi4py (works with pmi2).
    Otherwise the path of a libmpi.so."""


@dataclass(kw_only=True, slots=True)
class ContainerConfig:
    """A container around every role. The supervisor runs outside of it."""

    runtime: Literal["none", "apptainer", "podman-hpc", "pyxis", "edf"] = "none"
    """Container runtime. With `none` roles run without a container. `podman-hpc` is NERSC's
    wrapper around podman. `edf` is the container engine of CSCS, which srun calls by
    `--environment`."""
    program: str = ""
    """Program that starts a container with runtime `apptainer` or `podman-hpc`: a name on PATH,
    such as `singularity`, or a path. If it is empty, the name of the runtime is used."""
    options: list[str] = field(default_factory=list)
    """Further options of `apptainer exec` or `podman-hpc run`, such as `--nccl`. With `pyxis` and
    `edf`, set site.srun_options instead."""
    image: str = ""
    """Image of the container. With runtime `edf`: an environment definition file, or its name in
    the search path; the run adds its mounts in a file that inherits from it."""
    mounts: list[str] = field(default_factory=list)
    """Folders to mount: `/path` or `/path:/inside`. The run directory is always mounted."""
    python: str = "python3"
    """Interpreter inside the container."""


@dataclass(kw_only=True, slots=True)
class SiteConfig:
    """Properties of a cluster that are the same for all runs on it."""

    name: str = ""
    """Name of the cluster."""
    partition: str = ""
    """Slurm partition of the jobs."""
    hub_partition: str = ""
    """Partition of CPU nodes for the hub. If it is empty, the hub uses `partition`."""
    cpu_nodes: bool = True
    """Whether there are nodes without GPUs for the hub. If false, the hub of a `het` job shares the
    nodes of the group with the most nodes; in the layout `jobs` its job requests one GPU, because
    every job must."""
    account: str = ""
    """Slurm account of the jobs."""
    qos: str = ""
    """Slurm quality of service of the jobs."""
    gpu_request: Literal["gpus_per_node", "gres", "none"] = "gpus_per_node"
    """Option by which jobs request GPUs. With `none` jobs request no GPUs."""
    gpu_vendor: Literal["auto", *VENDORS] = "auto"  # type: ignore[valid-type]
    """Vendor of the GPUs, which decides on tools, device files, variables and container options.
    `auto`: the vendor of the node that starts a process, by its driver. Set it if the hub runs on a
    node without GPUs and the vendor is not the first one. Only the first one was tested."""
    max_gpu_used_share: float = bounded(0.1, 0.0, 1.0)
    """Largest share of a GPU's memory that may be in use before a group starts on it. A larger
    share means that another process was left over. 1 accepts every share."""
    gpu_type: str = ""
    """GPU type, as in `gres/gpu:TYPE`."""
    gpu_memory_gib: float = bounded(79.0, 0.0, 4096.0)
    """Memory of one GPU in GiB as torch reports it: 79 for an H100 or A100 with 80 GB, 39 for 40
    GB, 139 for an H200. A run that cannot fit by calculation is refused, see `relax-hpc plan`. With
    0 nothing is refused."""
    memory_includes_gpus: bool = False
    """Whether Slurm counts the memory of the GPUs as memory of a node, as sites with Grace Hopper
    do. `doctor` then compares a run with the rest."""
    memory_request: Literal["mem", "none"] = "mem"
    """Option by which jobs request memory. `none`: the site derives memory from the CPUs and
    accepts no memory option; `memory` of groups is ignored."""
    options: dict[str, str | None] = field(default_factory=dict)
    """sbatch options of every job by their long names, such as `reservation` or `mail-user`. A
    value replaces the value that relax_hpc writes, and null removes the option: `{mem: null,
    ntasks-per-node: null}`. Options on which recovery depends (`signal`, `requeue`, `no-kill`) can
    be replaced, not removed."""
    cpu_options: dict[str, str | None] = field(default_factory=dict)
    """sbatch options of allocations without GPUs, after `options`."""
    gpu_options: dict[str, str | None] = field(default_factory=dict)
    """sbatch options of allocations with GPUs, after `options`, such as `{constraint: a100}`."""
    cpu_srun_options: dict[str, str | None] = field(default_factory=dict)
    """srun options of groups without GPUs, after `srun_options`."""
    gpu_srun_options: dict[str, str | None] = field(default_factory=dict)
    """srun options of groups with GPUs, after `srun_options`."""
    srun_options: dict[str, str | None] = field(default_factory=dict)
    """srun options of every step by their long names, such as `{cpu-freq: high, mem-bind: local}`.
    A value replaces the value that relax_hpc writes, and null removes the option: `{mem: null}`.
    `kill-on-bad-exit`, `wait` and `no-kill` can be replaced, not removed. With `cpu-bind` Slurm
    binds the ranks to cores; without it each rank is bound to its own cores near its GPU. Slurm
    ignores `hint` together with a binding, and every role has a binding. Set `hint` in
    site.options, for the job."""
    setup: list[str] = field(default_factory=list)
    """Lines of bash that every batch script runs first: `module purge`, `source /site/profile`,
    `ulimit -n 65536`. Roles and the standby supervisor inherit variables and limits (NOFILE,
    MEMLOCK, NPROC, STACK)."""
    modules: list[str] = field(default_factory=list)
    """Environment modules to load."""
    on_end: list[str] = field(default_factory=list)
    """Command that runs on the node of the hub when the run has ended and is not continued, such as
    `[/site/notify, me@there]`. It gets three more arguments: finished, stopped or failed; the run
    directory; and the reason. It may take 30 s."""
    on_event: list[str] = field(default_factory=list)
    """Command that receives events of a run while it works, such as `[/site/page-me, --urgent]`: a
    group that others wait for, work that is not saved, no progress, a loss that is not finite,
    falling goodput, a full disk, a lost engine, the end of the run. It runs on the node of the hub,
    once for each event and once when the event is resolved, without a shell, and reads the event
    from standard input as one JSON document. `events` has the bounds."""
    env: dict[str, str] = field(default_factory=dict)
    """Environment variables of every process, such as NCCL_IB_HCA or UCX_NET_DEVICES."""
    python: str = ""
    """Interpreter on the nodes that has relax_hpc. If it is empty, the interpreter of `relax-hpc
    submit` is used."""
    interface: str = ""
    """Network interface for sockets, gloo and the bootstrap of NCCL. If it is empty, the interface
    of the host's name is used."""
    mpi: MpiConfig = field(default_factory=MpiConfig)
    container: ContainerConfig = field(default_factory=ContainerConfig)
    sbatch_on_nodes: bool = True
    """Whether compute nodes may call sbatch. If false, replacements are spare jobs on hold, and
    successors are submitted when the run starts."""
    local_dir: str = ""
    """Folder on the local disk of each node for caches and staging. If it is empty, $TMPDIR or /tmp
    is used."""
    stage: list[Literal["model", "environment"]] = field(default_factory=list)
    """Data that are copied to local_dir once per node, so that processes do not read them from the
    shared filesystem. `model`: the model. `environment`: the virtual or conda environment of the
    interpreter."""
    kernel_cache: str = ""
    """Folder on the shared filesystem for archives of compiled kernels, which only you can write.
    Each node unpacks the archive of its GPUs, its software and the model to local_dir when it
    starts, and adds the kernels that it lacks. If it is empty, each job compiles again. See
    `relax-hpc warm`."""
