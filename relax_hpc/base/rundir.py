"""The run directory: paths of all files of a run, and functions to read and write them."""

from __future__ import annotations

import contextlib
import json
import os
import pwd
import re
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

from relax_hpc.base.errors import ConfigError
from relax_hpc.base.foreign_files import parse_json, read_in_run
from relax_hpc.base.protocol import RUN_FORMAT

MIN_TOKEN_BYTES = 32
_TOKEN_BYTES = 4096
"""Bytes of the token file, at most."""
_NUMBERED = re.compile(r"(\d{6})\b", re.ASCII)
_CHECKPOINT = re.compile(r"(?:(\w+)-)?i(\d{6})-step-(\d{6})", re.ASCII)


def checkpoint_name(role: str, incarnation: int, step: int) -> str:
    """Name of the folder of a checkpoint. ``role``: the trainer that wrote it; empty: the actor.

    >>> checkpoint_name("", 1, 100), checkpoint_name("critic", 2, 100)
    ('i000001-step-000100', 'critic-i000002-step-000100')
    """
    return "-".join(filter(None, (role, f"i{incarnation:06d}-step-{step:06d}")))


@contextlib.contextmanager
def replace_when_written(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of ``path``. At the end of the block it replaces ``path``.

    Readers see the complete file or none. To survive a power loss, the block must sync the file and
    the caller the folder. An OSError names ``path``, because the operating system does not name the
    file of a write.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        # On a full disk, the incomplete file would take space that others need.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def write_atomic(
    path: Path, data: bytes | memoryview, sync: bool = False, tail: bytes = b""
) -> None:
    """Replace ``path`` by ``data`` and ``tail``, atomically. ``sync``: it survives a power loss."""
    with replace_when_written(path) as temporary, temporary.open("wb") as file:
        file.write(data)
        file.write(tail)
        if sync:
            file.flush()
            os.fsync(file.fileno())
    if sync:
        sync_directory(path.parent)


def write_json(path: Path, value: Any, sync: bool = False) -> None:
    """Write ``value`` as JSON, see `write_atomic`."""
    write_atomic(path, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n", sync)


def read_map(path: Path, **kinds: type | tuple[type, ...]) -> dict[str, Any]:
    """The JSON object in ``path``, whose entries have the types ``kinds``. Empty: it has no such.

    No exception is raised, because users may edit files of a run directory, and a file may be
    incomplete. A link that leaves the run directory, or a file that is not regular, is not opened.
    """
    try:
        value = parse_json(read_in_run(path))
    except (OSError, ValueError):
        return {}
    return value if is_map(value, **kinds) else {}


def is_map(value: object, **kinds: type | tuple[type, ...]) -> TypeGuard[dict[str, Any]]:
    """Whether ``value`` is a mapping whose entries have the types ``kinds``. A missing entry counts
    as None."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) for name, kind in kinds.items()
    )


def write_numbered(folder: Path, suffix: str, data: bytes = b"") -> Path:
    """Write ``data`` to ``folder``/NNNNNN``suffix`` with the next free number. The file appears
    complete, and never replaces another one."""
    folder.mkdir(parents=True, exist_ok=True)
    numbers = [int(match[1]) for path in folder.iterdir() if (match := _NUMBERED.match(path.name))]
    number = 1 + max(numbers, default=0)
    temporary = folder / f".{os.getpid()}.{secrets.token_hex(4)}"
    write_atomic(temporary, data, sync=True)
    try:
        while True:
            path = folder / f"{number:06d}{suffix}"
            try:
                os.link(temporary, path)
                return path
            except FileExistsError:
                number += 1
    finally:
        temporary.unlink()


def private_folder(path: Path) -> Path:
    """Create the folder ``path`` if needed, with access for this user only. Returns ``path``.

    ConfigError: another user owns it or can write to it. In a shared folder such as /tmp, another
    user can create a folder with a known name first.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.lstat()
    is_own_folder = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if is_own_folder and not status.st_mode & 0o022:
        path.chmod(0o700)
    else:
        raise ConfigError(
            f"{path}: not a folder of this user alone; have its owner remove it, or set "
            "site.local_dir"
        )
    return path


def check_owner(run_dir: Path, command: str) -> None:
    """Raise ConfigError if the run or its configuration belongs to another user.

    ``command`` would otherwise run the programs and cancel the jobs that the other user has named
    in the run's files.
    """
    for path in (run_dir, run_dir / "config.yaml"):
        owner = path.stat().st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"{command}: {path} belongs to user {_user_name(owner)}; its files name programs, "
                "modules and jobs, on which this command would act as you: ask the owner, or read "
                "these files and copy the run to a folder of yours first"
            )


def _user_name(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def sync_directory(path: Path) -> None:
    """Make renames in ``path`` durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths of a run.

    >>> RunDir(Path("/r")).logs("actor", 2)
    PosixPath('/r/logs/actor/inc-000002')
    """

    root: Path

    def __post_init__(self) -> None:
        object.__setattr__(self, "root", Path(self.root).absolute())

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def algorithm(self) -> Path:
        """Record of an algorithm that the user has written, see `algorithms.algorithm_record`."""
        return self.root / "algorithm.json"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def model(self) -> Path:
        """Hugging Face directory of version 0: a new one, or a link to `model.path`."""
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def media(self) -> Path:
        """Folder of images, videos and sounds of prompts, named by their content."""
        return self.root / "queue" / "media"

    @property
    def eval_media(self) -> Path:
        """Folder of media of evaluation prompts, named by their content. They are never removed."""
        return self.data / "media"

    @property
    def journal(self) -> Path:
        return self.root / "queue" / "journal"

    @property
    def shards(self) -> Path:
        return self.root / "queue" / "shards"

    @property
    def weights(self) -> Path:
        return self.root / "weights"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    def saved(self, role: str = "") -> list[tuple[int, Path]]:
        """(step, folder) of each checkpoint of the trainer ``role``; empty: of the actor.

        Incomplete checkpoints are included. They are sorted by name, see `checkpoint_name`.
        """
        checkpoints = []
        for path in sorted(self.checkpoints.glob("*-step-*")):
            match = _CHECKPOINT.fullmatch(path.name)
            if match and (match[1] or "") == role:
                checkpoints.append((int(match[3]), path))
        return checkpoints

    @property
    def samples(self) -> Path:
        """Folder of sampled episodes for people to read, see `relax_hpc.rollout.sample_log`."""
        return self.root / "samples"

    @property
    def profiles(self) -> Path:
        """Folder of traces, see `profile.steps`."""
        return self.root / "profiles"

    @property
    def tensorboard(self) -> Path:
        return self.root / "tensorboard"

    @property
    def metrics(self) -> Path:
        return self.root / "metrics.jsonl"

    @property
    def failures(self) -> Path:
        """First failure of each kind, see `relax_hpc.base.metrics.first_failures`."""
        return self.root / "failures.jsonl"

    @property
    def events(self) -> Path:
        return self.root / "events.jsonl"

    @property
    def preparing(self) -> Path:
        """File with the present activity of the process that prepares the run."""
        return self.root / "logs" / "preparing.json"

    @property
    def finished(self) -> Path:
        """File that exists once every step is trained and evaluated."""
        return self.root / "finished.json"

    @property
    def stop(self) -> Path:
        """File that exists after a request to stop the run, or after the run has failed. A resume
        removes it."""
        return self.root / "stop.json"

    @property
    def submit(self) -> Path:
        """Folder of the scripts that were submitted to Slurm, and the numbers of their jobs."""
        return self.root / "submit"

    @property
    def code(self) -> Path:
        """Folder with the package as it was at submission."""
        return self.root / "code"

    def rendezvous(self, group: str) -> Path:
        return self.root / "rendezvous" / group

    def logs(self, group: str, incarnation: int) -> Path:
        return self.root / "logs" / group / f"inc-{incarnation:06d}"

    def rank_log(self, group: str, incarnation: int, role: str, rank: int) -> Path:
        """Log of one rank of a role, see `logs`."""
        return self.logs(group, incarnation) / f"{role}-rank-{rank}.log"

    def tracker_state(self, name: str) -> Path:
        """Progress in metrics.jsonl of the tracker ``name``."""
        return self.root / "trackers" / f"{name.replace(':', '.')}.json"

    @property
    def notifications(self) -> Path:
        """Events for people, such as a full disk, and which of them the site's command has got."""
        return self.root / "notifications.jsonl"

    def tracker_follower(self, name: str) -> Path:
        """Process of `relax-hpc track` for the tracker ``name``, and its failures."""
        return self.tracker_state(name).with_suffix(".follower.json")

    def exit_mark(self, group: str, incarnation: int, role: str) -> Path:
        """Exit mark, which a role writes when it ends. Only this mark means success, because srun
        can exit with 0 after a node failure."""
        return self.logs(group, incarnation) / f"exit-{role}.json"

    def create(self) -> None:
        """Create the directory (0700) and its token (0600), unless they exist."""
        try:
            self.root.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.root.chmod(0o700)
            for path in (
                self.journal,
                self.shards,
                self.weights,
                self.checkpoints,
                self.data,
                self.root / "logs",
            ):
                path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run_dir: cannot make {self.root}: {error.strerror}; name a writable folder"
            ) from error
        if not self.token_file.exists():
            write_json(self._format, {"format": RUN_FORMAT})
            self._make_token()

    def holds_other_files(self) -> bool:
        """Whether the folder has files other than those of a `create` that failed, as on a full
        disk."""
        files = (path for path in self.root.rglob("*") if not path.is_dir())
        return any(path != self._format for path in files)

    @property
    def _format(self) -> Path:
        return self.root / "format.json"

    def check_format(self) -> None:
        """Raise ConfigError if the run was written by code of another format."""
        number = read_map(self._format).get("format", self._unnumbered_format())
        if number != RUN_FORMAT:
            raise ConfigError(
                f"{self.root}: found a run of format {number}, this code reads {RUN_FORMAT}; "
                "resume it with the code that wrote it (<run>/code), or start a new run from one "
                "of its checkpoints, which relax-hpc convert reads"
            )

    def _unnumbered_format(self) -> int:
        """Format of a run without format.json, by the names of its journals."""
        journals = [path.name for path in self.journal.glob("*.journal")]
        if not journals:
            return RUN_FORMAT
        # Format 1 called an incarnation an epoch.
        return 1 if any(name.startswith("epoch-") for name in journals) else 2

    def _make_token(self) -> None:
        """Create the token file atomically, also if another process creates it at the same time."""
        temporary = self.root / f".token.{os.getpid()}.{secrets.token_hex(4)}"
        try:
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w"
            ) as file:
                file.write(secrets.token_hex(32))
            with contextlib.suppress(FileExistsError):
                os.link(temporary, self.token_file)
        except OSError as error:
            error.filename, error.filename2 = str(self.token_file), None
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def token(self) -> bytes:
        """The secret of the run, which authenticates every message and every request to an
        engine."""
        try:
            token = read_in_run(self.token_file, _TOKEN_BYTES).strip()
        except OSError as error:
            raise ConfigError(
                f"{self.token_file}: {error.strerror}; it is made with the run directory"
            ) from error
        if len(token) < MIN_TOKEN_BYTES:
            raise ConfigError(
                f"{self.token_file}: {len(token)} bytes, expected at least {MIN_TOKEN_BYTES}; "
                "delete it"
            )
        return token
