"""The run directory: the one place that knows where everything of a run lies."""

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
"""Bytes of the file of a token, at most."""
_NUMBERED = re.compile(r"(\d{6})\b", re.ASCII)
_CHECKPOINT = re.compile(r"(?:(\w+)-)?i(\d{6})-step-(\d{6})", re.ASCII)


def checkpoint_name(role: str, incarnation: int, step: int) -> str:
    """Name of the folder of a checkpoint; ``role``: whose part of it that is, empty for the
    policy's.

    >>> checkpoint_name("", 1, 100), checkpoint_name("critic", 2, 100)
    ('i000001-step-000100', 'critic-i000002-step-000100')
    """
    return "-".join(filter(None, (role, f"i{incarnation:06d}-step-{step:06d}")))


@contextlib.contextmanager
def replace_when_written(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write a file to, which then takes its place: readers see all of it
    or nothing.

    To survive a power loss the block syncs the file, and whoever calls it the folder. An OSError
    names ``path``: the operating system does not say which file a write was for.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException as error:
        # What a full disk has taken of it would keep it full.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename in (None, str(temporary)):
            error.filename = str(path)
        raise


def write_atomic(
    path: Path, data: bytes | memoryview, sync: bool = False, tail: bytes = b""
) -> None:
    """Write ``data``, then ``tail``, to ``path`` at once; ``sync``: so that it survives a power
    loss."""
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
    """The JSON object in ``path``, whose entries of these names are of these kinds; empty if it
    holds no such.

    A run directory is its user's: an editor's copy or a file that is half written ends no run. What
    is no regular file, or a link that leaves the run directory, is not opened.
    """
    try:
        value = parse_json(read_in_run(path))
    except (OSError, ValueError):
        return {}
    return value if is_map(value, **kinds) else {}


def is_map(value: object, **kinds: type | tuple[type, ...]) -> TypeGuard[dict[str, Any]]:
    """Whether it is a mapping whose entries of these names are of these kinds; what it lacks counts
    as null."""
    return isinstance(value, dict) and all(
        isinstance(value.get(name), kind) for name, kind in kinds.items()
    )


def write_numbered(folder: Path, suffix: str, data: bytes = b"") -> Path:
    """Write ``data`` to ``folder``/NNNNNN``suffix`` under the next free number; the file appears
    whole and once."""
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
    """``path``, made if needed, for this user alone.

    ConfigError if somebody else made it or can write in it: a shared place with a known name can be
    taken.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = path.lstat()
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022:
        path.chmod(0o700)
    else:
        raise ConfigError(
            f"{path}: not a folder of this user alone; have its owner remove it, or set "
            "site.local_dir"
        )
    return path


def check_owner(run_dir: Path, what: str) -> None:
    """ConfigError: the run, or its configuration, belongs to another user, so that the command
    ``what`` would run the programs and end the jobs that this user has named in it."""
    for path in (run_dir, run_dir / "config.yaml"):
        owner = path.stat().st_uid
        if owner != os.geteuid():
            raise ConfigError(
                f"{what}: {path} belongs to user {_user_name(owner)}; its files name programs, "
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
        """Record of an algorithm of the user's own, see `algorithms.record_of`."""
        return self.root / "algorithm.json"

    @property
    def token_file(self) -> Path:
        return self.root / "token"

    @property
    def model(self) -> Path:
        """Hugging Face directory of version 0: made here, or a link to `model.path`."""
        return self.root / "model"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def media(self) -> Path:
        """Folder of images, videos and sounds of prompts, by their content."""
        return self.root / "queue" / "media"

    @property
    def eval_media(self) -> Path:
        """Media of evaluations' prompts, by content, for as long as the run."""
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
        """(step, folder) of each checkpoint of the policy, or of another ``role`` that trains:
        whole or not, in the order of their names, which are those of `checkpoint_name`."""
        found = [
            (_CHECKPOINT.fullmatch(path.name), path)
            for path in sorted(self.checkpoints.glob("*-step-*"))
        ]
        return [
            (int(match[3]), path) for match, path in found if match and (match[1] or "") == role
        ]

    @property
    def samples(self) -> Path:
        """Folder of what the model has written, for people: see `relax_hpc.rollout.sample_log`."""
        return self.root / "samples"

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
        """File in which the process that prepares the run says what it is doing."""
        return self.root / "logs" / "preparing.json"

    @property
    def finished(self) -> Path:
        """File that exists once every step is trained and evaluated."""
        return self.root / "finished.json"

    @property
    def stop(self) -> Path:
        """Exists while the whole run is asked to stop, or has given up; a resume removes it."""
        return self.root / "stop.json"

    @property
    def submit(self) -> Path:
        """Folder of what was handed to Slurm, and which jobs came of it."""
        return self.root / "submit"

    @property
    def code(self) -> Path:
        """Folder with the package as it was at submission."""
        return self.root / "code"

    def rendezvous(self, group: str) -> Path:
        return self.root / "rendezvous" / group

    def logs(self, group: str, incarnation: int) -> Path:
        return self.root / "logs" / group / f"inc-{incarnation:06d}"

    def tracker_state(self, name: str) -> Path:
        """Progress in metrics.jsonl of the tracker with the import path ``name``."""
        return self.root / "trackers" / f"{name.replace(':', '.')}.json"

    def exit_mark(self, group: str, incarnation: int, role: str) -> Path:
        """Exit mark of a role, written by itself: success is this mark, never an exit code
        alone."""
        return self.logs(group, incarnation) / f"exit-{role}.json"

    def create(self) -> None:
        """Make the directory (0700) and its token (0600); both stay as they are when they exist."""
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
        """Whether the folder has files that `create` did not leave there when it failed, as on a
        full disk."""
        files = (path for path in self.root.rglob("*") if not path.is_dir())
        return any(path != self._format for path in files)

    @property
    def _format(self) -> Path:
        return self.root / "format.json"

    def check_format(self) -> None:
        """ConfigError if the run was made by code of another format: its names mean something
        else."""
        # Before there were numbers, an incarnation was an epoch, and then one.
        journals = [path.name for path in self.journal.glob("*.journal")]
        unsaid = (
            (1 if any(name.startswith("epoch-") for name in journals) else 2)
            if journals
            else RUN_FORMAT
        )
        if (found := read_map(self._format).get("format", unsaid)) != RUN_FORMAT:
            raise ConfigError(
                f"{self.root}: found a run of format {found}, this code reads {RUN_FORMAT}; go on "
                "with the code that "
                "made it (<run>/code), or start anew from what it has learnt: relax-hpc convert "
                "takes its checkpoints"
            )

    def _make_token(self) -> None:
        """The token appears whole and once, whoever else makes this run directory at the same
        time."""
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
        """The run's secret, which authenticates every message and engine request."""
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
