"""The files of a sandbox: what Slurm reads, and what a user sources or gives to relax-hpc."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from relax_hpc.cluster.sandbox.options import Options

FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "tmp")
_LIBMPI = ("lib/*-linux-gnu/libmpi.so.40", "lib64/openmpi/lib/libmpi.so.40", "lib64/libmpi.so.40")


def host() -> str:
    """Short name of this machine, which all nodes share."""
    return socket.gethostname().split(".")[0]


def write(folder: Path, options: Options) -> None:
    """Write slurm.conf and its neighbours, the nodes' folders, the munge key and env.sh."""
    for name in FOLDERS:
        (folder / name).mkdir(exist_ok=True, mode=0o700 if name == "state" else 0o755)
    for node in options.node_names:
        (folder / "spool" / node).mkdir(exist_ok=True)
        (folder / "tmp" / node).mkdir(exist_ok=True)
        (folder / "tmp" / node).chmod(0o1777)
    _write_key(folder / "etc/munge.key")
    for number in range(options.gpus):
        _link_null(folder / f"dev/gpu{number}")
    (folder / "etc/slurm.conf").write_text(slurm_conf(folder, options), encoding="utf-8")
    (folder / "etc/gres.conf").write_text(_gres_conf(folder, options), encoding="utf-8")
    (folder / "etc/cgroup.conf").write_text("CgroupAutomount=no\n", encoding="utf-8")
    (folder / "env.sh").write_text(f"export SLURM_CONF={folder}/etc/slurm.conf\n", encoding="utf-8")


def _write_key(path: Path) -> None:
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as key:
            key.write(os.urandom(128))


def _link_null(path: Path) -> None:
    # slurmd wants a character device and follows links; with a device it sets CUDA_VISIBLE_DEVICES.
    if not path.is_symlink():
        path.symlink_to("/dev/null")


def _gres_conf(folder: Path, options: Options) -> str:
    if not options.gpus or not options.nodes:
        return ""
    return (
        f"NodeName=node[1-{options.nodes}] Name=gpu File={folder}/dev/gpu[0-{options.gpus - 1}] "
        "AutoDetect=off\n"
    )


def slurm_conf(folder: Path, options: Options) -> str:
    """The text of slurm.conf; a line of `options.extra` takes the place of the setting of the same
    name."""
    return "".join(f"{line}\n" for line in _replace(_lines(folder, options), options.extra))


def _replace(lines: Iterable[str], extra: Iterable[str]) -> list[str]:
    """`lines` with each of `extra` in the place of the line that sets the same, or at the end."""
    settings: dict[str, str] = {}
    for line in (*lines, *extra):
        name, _, value = line.partition("=")
        # There may be many nodes and partitions, told apart by their own names.
        several = name.lower() in ("nodename", "partitionname", "nodeset")
        settings[f"{name}={value.split()[0]}".lower() if several else name.lower()] = line
    return list(settings.values())


def _lines(folder: Path, options: Options) -> list[str]:
    me = pwd.getpwuid(os.getuid()).pw_name
    return [
        "ClusterName=sandbox",
        f"SlurmctldHost={host()}(127.0.0.1)",
        f"SlurmctldPort={options.port}",
        # MPICH names its shared memory by job and step, and a killed rank leaves it: sandboxes must
        # not share numbers.
        f"FirstJobId={100 * options.port + 1}",
        f"SlurmUser={me}",
        f"SlurmdUser={me}",
        "AuthType=auth/munge",
        # A requeued job waits until its old credential has expired: 120 s by default.
        f"AuthInfo=socket={folder}/run/munge.sock,cred_expire={options.cred_expire}",
        # Listen on 127.0.0.1 only.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        # One a node: PMIx makes a folder of the same name on every node of a step.
        f"TmpFS={folder}/tmp/%n",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        "MailProg=/bin/true",
        # No cgroup is touched.
        "ProctrackType=proctrack/linuxproc",
        f"TaskPlugin=task/{'affinity' if options.bind else 'none'}",
        "SwitchType=switch/none",
        "MpiDefault=none",
        # Believe slurm.conf about CPUs and memory, not the machine.
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        # Without it a job would take all memory of its nodes, and no second one would fit.
        "DefMemPerCPU=100",
        "GresTypes=gpu",
        "PropagateResourceLimits=NONE",
        "ReturnToService=2",
        "JobRequeue=1",
        "SlurmctldTimeout=30",
        f"SlurmdTimeout={options.slurmd_timeout}",
        f"KillWait={options.kill_wait}",
        "CompleteWait=0",
        "InactiveLimit=0",
        "MinJobAge=600",
        "MessageTimeout=10",
        "TCPTimeout=2",
        "OverTimeLimit=0",
        # Heterogeneous jobs are started by the backfill scheduler alone, whose default interval is
        # 30 s.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_resolution=1,"
        "bf_window=120,bf_continue,bf_hetjob_immediate,requeue_setup_env_fail",
        "PriorityType=priority/basic",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={folder}/log/jobcomp.txt",
        *([_serving(options)] if options.nodes else []),
        *(
            f"NodeName={line} NodeAddr=127.0.0.1 Port={options.dead_port} State=UNKNOWN"
            for line in options.declared
        ),
        *_partitions(options),
    ]


def _serving(options: Options) -> str:
    """The nodes that run jobs."""
    gpus = f" Gres=gpu:{options.gpus}" if options.gpus else ""
    cores = (
        f" Sockets={options.sockets} CoresPerSocket={options.cpus // options.sockets} "
        "ThreadsPerCore=1"
    )
    ports = f"{options.port + 1}-{options.port + options.nodes}"
    return (
        f"NodeName=node[1-{options.nodes}] NodeHostname={host()} NodeAddr=127.0.0.1 Port={ports} "
        f"CPUs={options.cpus}{cores if options.sockets > 1 else ''} "
        f"RealMemory={options.memory}{gpus} State=UNKNOWN"
    )


def _partitions(options: Options) -> list[str]:
    serving, rest = (
        f"node[1-{options.nodes}]",
        "MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO",
    )
    declared = ",".join(line.split()[0] for line in options.declared)
    first = [f"PartitionName=main Nodes={serving} Default=YES {rest}"] if options.nodes else []
    default = "NO" if first else "YES"
    return [
        *first,
        *(
            [f"PartitionName=declared Nodes={declared} Default={default} {rest}"]
            if declared
            else []
        ),
    ]


def open_mpi() -> str:
    """The system's Open MPI library; empty without one."""
    return next(
        (str(path) for pattern in _LIBMPI for path in sorted(Path("/usr").glob(pattern))), ""
    )


def write_site(folder: Path, options: Options, pmix: bool) -> None:
    """Write site.yaml, the site file of relax-hpc runs here; `pmix`: srun can start the system's
    Open MPI with it."""
    mpi = (
        {"launcher": "pmix", "library": open_mpi()}
        if pmix
        else {"launcher": "pmi2", "library": "wheel"}
    )
    site: dict[str, Any] = {
        "name": "sandbox",
        "partition": "main" if options.nodes else "declared",
        "interface": "lo",
        "gpu_request": "gpus_per_node" if options.gpus else "none",
        # All nodes share this machine's cores: their first ranks would sit on the same one.
        "srun_options": {} if options.bind else {"cpu-bind": "none"},
        "sbatch_on_nodes": True,
        "mpi": mpi,
    }
    if pmix:
        # Ranks of two nodes would take each other's shared memory for their own: the nodes have one
        # host name.
        site["env"] = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    (folder / "site.yaml").write_text(
        yaml.safe_dump({"site": site}, sort_keys=False), encoding="utf-8"
    )
