"""Options of a sandbox that a user may give, their ranges, and where they are kept."""

from __future__ import annotations

import json
import re
import zlib
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import read_json_object

MAX_NODES = 60
"""Nodes at most: more would not fit into a folder's block of ports."""
_BLOCK, _FIRST, _BLOCKS = 64, 20000, 190
"""Ports a sandbox takes, the first block's first port, and blocks; all lie below the kernel's
ephemeral ports."""
_NOBODY = _BLOCK - 1
"""Number, among these ports, of the one that nobody listens on."""
_MAX_FOLDER = 64
"""Bytes of a folder's path, so that the sockets of munge and of the steps below it stay under the
kernel's 107."""


def _option(default: int, low: int, high: int) -> int:
    return field(default=default, metadata={"low": low, "high": high})


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """Size and timing of a sandbox. ConfigError names a value out of its range.

    >>> Options(nodes=2).node_names
    ('node1', 'node2')
    """

    nodes: int = _option(4, 0, MAX_NODES)
    """Nodes that run jobs; 0 only beside `declared` ones."""
    cpus: int = _option(8, 1, 1024)
    """CPUs that each node claims to have, whatever the machine has."""
    sockets: int = _option(1, 1, 64)
    """Sockets that these are in."""
    memory: int = _option(4000, 100, 10_000_000)
    """MB that each node claims to have."""
    gpus: int = _option(2, 0, 64)
    """GPUs that each node claims to have: links to /dev/null that Slurm counts and hands out."""
    slurmd_timeout: int = _option(10, 2, 3600)
    """Seconds after which Slurm takes a silent node for dead."""
    kill_wait: int = _option(3, 1, 3600)
    """Seconds between SIGTERM and SIGKILL of a job that has to go."""
    cred_expire: int = _option(8, 2, 3600)
    """Life of a job's credential in seconds; a requeued job starts about 2 s after it."""
    port: int = _option(0, 0, 65535 - _BLOCK)
    """First of 64 ports; 0: a free block, drawn from the folder's name."""
    bind: bool = False
    """Whether processes are bound to the CPUs that Slurm gave them (task/affinity), as on most
    clusters. All nodes share this machine's CPUs, so it must have as many as a node claims."""
    declared: tuple[str, ...] = ()
    """Further nodes that slurmctld knows and that run nothing, as NodeName= of slurm.conf describes
    them: what a large cluster makes of a request can be read off held jobs (`sbatch --hold`,
    `scontrol show job`), in partition `declared`. An example: "big[1-128] Sockets=2
    CoresPerSocket=32 RealMemory=1000000 Gres=gpu:8"."""
    extra: tuple[str, ...] = ()
    """Further lines of slurm.conf; one for a setting that is there already takes its place."""

    def __post_init__(self) -> None:
        for item in fields(self):
            value, low, high = (
                getattr(self, item.name),
                item.metadata.get("low"),
                item.metadata.get("high"),
            )
            if low is not None and not low <= value <= high:
                raise ConfigError(f"sandbox: {item.name}: found {value}, allowed {low} to {high}")
        if self.cpus % self.sockets:
            raise ConfigError(
                f"sandbox: sockets: found {self.sockets}, allowed: a divisor of the {self.cpus} "
                "cpus"
            )
        if not self.nodes and not self.declared:
            raise ConfigError(
                f"sandbox: nodes: found 0, allowed 1 to {MAX_NODES}, or 0 beside declared ones"
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
        """Port at which declared nodes are said to be."""
        return self.port + _NOBODY

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(f"node{number}" for number in range(1, self.nodes + 1))


def save(options: Options, path: Path) -> None:
    """Write `options` as JSON."""
    path.write_text(json.dumps(asdict(options), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Options | None:
    """Options saved at `path`; None if there are none."""
    if not path.exists():
        return None
    saved = read_json_object(path, "remove the file and call up again")
    known = {item.name for item in fields(Options)}
    if not set(saved) <= known:
        raise ConfigError(f"{path}: found unknown options, remove the file and call up again")
    lists = {name: tuple(saved.get(name, ())) for name in ("extra", "declared")}
    return replace(Options(), **saved | lists)


def check_folder(folder: Path) -> None:
    """ConfigError unless Slurm can live in `folder`, an absolute path."""
    size = len(str(folder).encode())
    if size > _MAX_FOLDER:
        raise ConfigError(
            f"sandbox: folder: found {folder} of {size} bytes, allowed {_MAX_FOLDER}: the kernel "
            "takes no unix socket with a longer path; choose a folder such as /tmp/sandbox"
        )
    if not re.fullmatch(r"/[\w./+-]+", str(folder), re.ASCII):
        raise ConfigError(
            f"sandbox: folder: found {str(folder)!r}, allowed letters, digits and . _ + - / "
            "(slurm.conf)"
        )


def port_blocks(folder: Path) -> list[int]:
    """First ports of all blocks, the one that the folder's name points to first."""
    start = zlib.crc32(str(folder).encode())
    return [_FIRST + (start + step) % _BLOCKS * _BLOCK for step in range(_BLOCKS)]
