"""The files of a sandbox: Slurm's configuration, the script that a user sources, and the site file
for relax-hpc."""

from __future__ import annotations

import os
import pwd
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from relax_hpc.cluster.sandbox.installation import SlurmInstallation
from relax_hpc.cluster.sandbox.options import Options

FOLDERS = ("etc", "run", "log", "state", "spool", "dev", "tmp")
VERSION_FILE = "slurm-version"
"""File in the folder of a sandbox with the version of Slurm that wrote its state."""
MAILS = "log/mails.txt"
"""File in the folder of a sandbox with the subject of each mail that Slurm would send."""
_MAIL_PROGRAM = "etc/mail.sh"
_LIBMPI = ("lib/*-linux-gnu/libmpi.so.40", "lib64/openmpi/lib/libmpi.so.40", "lib64/libmpi.so.40")


def host() -> str:
    """Short name of this machine, which is the host name of all nodes."""
    return socket.gethostname().split(".")[0]


def write(folder: Path, options: Options) -> None:
    """Write Slurm's configuration files, the folders of the nodes, the munge key and env.sh."""
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
    _write_mail_program(folder)
    slurm = SlurmInstallation(options.slurm)
    (folder / "etc/cgroup.conf").write_text(slurm.cgroup_conf(), encoding="utf-8")
    (folder / VERSION_FILE).write_text(f"{slurm.version()}\n", encoding="utf-8")
    variables = f"export SLURM_CONF={folder}/etc/slurm.conf\n{slurm.exports()}"
    (folder / "env.sh").write_text(variables, encoding="utf-8")


def _write_mail_program(folder: Path) -> None:
    """Write the program that slurmctld calls as `PROGRAM -s SUBJECT USER` for each mail."""
    program = folder / _MAIL_PROGRAM
    script = f"""#!/bin/sh
printf '%s\\n' "$2" >> "{folder}/{MAILS}"
"""
    program.write_text(script, encoding="utf-8")
    program.chmod(0o700)


def _write_key(path: Path) -> None:
    if not path.exists():
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as key:
            key.write(os.urandom(128))


def _link_null(path: Path) -> None:
    # slurmd 22.05 accepts only a character device in gres.conf, and follows links. With a device it
    # sets the variables of visible GPUs.
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
    """The text of slurm.conf. A line of `options.extra` replaces the setting with the same name."""
    return "".join(f"{line}\n" for line in _replace(_lines(folder, options), options.extra))


def _replace(lines: Iterable[str], extra: Iterable[str]) -> list[str]:
    """`lines`, in which each line of `extra` replaces the line with the same setting. New settings
    come last."""
    settings: dict[str, str] = {}
    for line in (*lines, *extra):
        name, _, value = line.partition("=")
        key = name.lower()
        # These settings may be repeated, with different values.
        if key in ("nodename", "partitionname", "nodeset"):
            key = f"{name}={value.split()[0]}".lower()
        settings[key] = line
    return list(settings.values())


def _lines(folder: Path, options: Options) -> list[str]:
    user = pwd.getpwuid(os.getuid()).pw_name
    return [
        "ClusterName=sandbox",
        f"SlurmctldHost={host()}(127.0.0.1)",
        f"SlurmctldPort={options.port}",
        # MPICH 5.0.2 names its shared memory by job and step, and a killed rank does not remove it.
        # Therefore two sandboxes must not use the same job ids.
        f"FirstJobId={100 * options.port + 1}",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        *SlurmInstallation(options.slurm).settings(),
        "AuthType=auth/munge",
        # A requeued job starts about 2 s after its old credential has expired, by default 120 s.
        f"AuthInfo=socket={folder}/run/munge.sock,cred_expire={options.cred_expire}",
        # Listen on 127.0.0.1 only.
        "CommunicationParameters=NoInAddrAny,NoCtldInAddrAny",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool/%n",
        # Each node needs its own folder, because Slurm's PMIx plugin creates a folder with the same
        # name on every node of a step ("pmixp_mkdir: File exists").
        f"TmpFS={folder}/tmp/%n",
        f"SlurmctldPidFile={folder}/run/slurmctld.pid",
        f"SlurmdPidFile={folder}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={folder}/log/slurmctld.log",
        f"SlurmdLogFile={folder}/log/slurmd-%n.log",
        "SlurmctldDebug=verbose",
        "SlurmdDebug=verbose",
        f"MailProg={folder}/{_MAIL_PROGRAM}",
        # The sandbox does not use cgroups, so that it needs no root.
        "ProctrackType=proctrack/linuxproc",
        f"TaskPlugin=task/{'affinity' if options.bind else 'none'}",
        "SwitchType=switch/none",
        "MpiDefault=none",
        # slurmd uses the CPUs and the memory of slurm.conf, not those of the machine.
        "SlurmdParameters=config_overrides",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        # Without this, a job takes all memory of its nodes, and a second job does not fit.
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
        # Only the backfill scheduler starts heterogeneous jobs. Its default interval is 30 s.
        "SchedulerType=sched/backfill",
        "SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_resolution=1,"
        "bf_window=120,bf_continue,bf_hetjob_immediate,requeue_setup_env_fail",
        "PriorityType=priority/basic",
        "AccountingStorageType=accounting_storage/none",
        "JobCompType=jobcomp/filetxt",
        f"JobCompLoc={folder}/log/jobcomp.txt",
        *([_node_line(options)] if options.nodes else []),
        *(
            f"NodeName={line} NodeAddr=127.0.0.1 Port={options.dead_port} State=UNKNOWN"
            for line in options.declared
        ),
        *_partitions(options),
    ]


def _node_line(options: Options) -> str:
    """Line for the nodes that run jobs."""
    # One line declares all nodes with one port each. Debian's slurmd is built with
    # --enable-multiple-slurmd, so that several run on one host.
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
    limits = "MaxTime=INFINITE DefaultTime=10 State=UP OverSubscribe=NO"
    partitions = []
    if options.nodes:
        partitions.append(f"PartitionName=main Nodes=node[1-{options.nodes}] Default=YES {limits}")
    declared = ",".join(line.split()[0] for line in options.declared)
    if declared:
        default = "NO" if partitions else "YES"
        partitions.append(f"PartitionName=declared Nodes={declared} Default={default} {limits}")
    return partitions


def open_mpi() -> str:
    """Path of the system's Open MPI library; empty if it is not installed."""
    for pattern in _LIBMPI:
        for path in sorted(Path("/usr").glob(pattern)):
            return str(path)
    return ""


def write_site(folder: Path, options: Options, pmix: bool) -> None:
    """Write site.yaml, the site file for runs in this sandbox. `pmix`: srun can start the system's
    Open MPI."""
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
        # All nodes share the cores of this machine. With binding, the first ranks of all nodes
        # would share one core.
        "srun_options": {} if options.bind else {"cpu-bind": "none"},
        "sbatch_on_nodes": True,
        "mpi": mpi,
    }
    if pmix:
        # All nodes have the same host name, so that Open MPI 4.1 would use shared memory between
        # ranks of different nodes.
        site["env"] = {"OMPI_MCA_btl": "self,tcp", "OMPI_MCA_btl_tcp_if_include": "lo"}
    (folder / "site.yaml").write_text(
        yaml.safe_dump({"site": site}, sort_keys=False), encoding="utf-8"
    )
