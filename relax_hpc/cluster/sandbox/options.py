"""Options of a sandbox, their ranges, and the file that stores them."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object

MAX_NODES = 60
"""Largest number of nodes. The ports of more nodes would not fit into one block."""
_BLOCK, _FIRST, _BLOCKS = 64, 20000, 190
"""Number of ports of a sandbox, first port of the first block, and number of blocks. All ports are
below the kernel's ephemeral ports."""
_UNUSED = _BLOCK - 1
"""Position, in a block, of the port on which no process listens."""
# The kernel limits the path of a Unix socket to 107 bytes. The sockets of munge and of the steps
# are below the folder.
_MAX_FOLDER = 64
"""Largest length of the folder's path, in bytes."""


def _option(default: int, low: int, high: int) -> int:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Size and timing of a sandbox. ConfigError names a value out of its range.

    >>> Options(nodes=2).node_names
    ('node1', 'node2')
    """

    nodes: int = _option(4, 0, MAX_NODES)
    """Number of nodes that run jobs; 0 only together with `declared` nodes."""
    cpus: int = _option(8, 1, 1024)
    """CPUs that Slurm assumes on each node, independent of the machine."""
    sockets: int = _option(1, 1, 64)
    """Sockets that contain these CPUs."""
    memory: int = _option(4000, 100, 10_000_000)
    """Memory in MB that Slurm assumes on each node."""
    gpus: int = _option(2, 0, 64)
    """GPUs that Slurm assumes on each node. They are links to /dev/null, which Slurm counts and
    assigns."""
    slurmd_timeout: int = _option(10, 2, 3600)
    """Seconds without an answer after which Slurm marks a node down."""
    kill_wait: int = _option(3, 1, 3600)
    """Seconds between SIGTERM and SIGKILL of a job."""
    cred_expire: int = _option(8, 5, 3600)
    """Seconds until a job's credential expires. A requeued job starts about 2 s later. Slurm (22.05
    to 25.11) takes 120 instead of less than 5."""
    port: int = _option(0, 0, 65535 - _BLOCK)
    """First of 64 ports; 0: a free block, which depends on the folder's name."""
    slurm: str = ""
    """Folder with the bin/ and sbin/ of a Slurm that was built from source; empty: the Slurm on
    PATH. It must be built with --enable-multiple-slurmd."""
    bind: bool = False
    """Whether processes are bound to the CPUs that Slurm assigns (task/affinity), as on most
    clusters. All nodes share the CPUs of this machine, so it must have as many as one node."""
    declared: tuple[str, ...] = ()
    """Further nodes that slurmctld knows and that run no jobs, in the format of NodeName= in
    slurm.conf. They show how a large cluster handles a request: submit a held job to partition
    `declared` (`sbatch --hold`) and read `scontrol show job`. Example: "big[1-128] Sockets=2
    CoresPerSocket=32 RealMemory=1000000 Gres=gpu:8"."""
    extra: tuple[str, ...] = ()
    """Further lines of slurm.conf. A line replaces the setting with the same name."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            low, high = item.metadata.get("low"), item.metadata.get("high")
            if low is not None and not low <= value <= high:
                raise ConfigError(f"sandbox: {item.name}: found {value}, allowed {low} to {high}")
        if self.cpus % self.sockets:
            raise ConfigError(
                f"sandbox: sockets: found {self.sockets}, allowed: a divisor of the {self.cpus} "
                "cpus"
            )
        if self.slurm and not re.fullmatch(r"/[\w./+-]+", self.slurm, re.ASCII):
            raise ConfigError(
                f"sandbox: slurm: found {self.slurm!r}, allowed: an absolute path of letters, "
                "digits and . _ + - /"
            )
        if not self.nodes and not self.declared:
            raise ConfigError(
                f"sandbox: nodes: found 0, allowed 1 to {MAX_NODES}, or 0 with declared nodes"
            )
        for line in self.declared:
            if not re.match(r"[\w-]+(\[[\d,-]+\])?( \w+=\S+)*$", line):
                raise ConfigError(
                    f"sandbox: declared: found {line!r}, allowed: names and sizes, as in 'big[1-9] "
                    "CPUs=64 Gres=gpu:8'"
                )
        for line in self.extra:
            if not re.match(r"\w+=", line) or "\n" in line:
                raise ConfigError(
                    f"sandbox: extra: found {line!r}, allowed one line of slurm.conf, as in "
                    "'KillWait=5'"
                )

    @property
    def dead_port(self) -> int:
        """Port of all declared nodes, on which no process listens."""
        return self.port + _UNUSED

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))


def save(options: Options, path: Path) -> None:
    """Write `options` as JSON."""
    path.write_text(json.dumps(asdict(options), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Options | None:
    """Options saved at `path`; None if the file does not exist."""
    if not path.exists():
        return None
    saved = read_json_object(path, "remove the file and call up again")
    if not set(saved) <= {item.name for item in fields(Options)}:
        raise ConfigError(f"{path}: found unknown options, remove the file and call up again")
    lists = {name: tuple(saved.get(name, ())) for name in ("extra", "declared")}
    return replace(Options(), **saved | lists)


def check_folder(folder: Path) -> None:
    """ConfigError if the absolute path `folder` cannot be the folder of a sandbox."""
    size = len(str(folder).encode())
    if size > _MAX_FOLDER:
        raise ConfigError(
            f"sandbox: folder: found {folder} of {size} bytes, allowed {_MAX_FOLDER}: the kernel "
            "allows no Unix socket with a longer path; choose a folder such as /tmp/sandbox"
        )
    if not re.fullmatch(r"/[\w./+-]+", str(folder), re.ASCII):
        raise ConfigError(
            f"sandbox: folder: found {str(folder)!r}, allowed letters, digits and . _ + - / "
            "(slurm.conf)"
        )


def port_blocks(folder: Path) -> list[int]:
    """First ports of all blocks, beginning with the block that the folder's name selects."""
    start = zlib.crc32(str(folder).encode())
    return [_FIRST + (start + step) % _BLOCKS * _BLOCK for step in range(_BLOCKS)]
