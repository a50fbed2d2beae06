"""Errors of the operating system about a path, explained in one sentence for users."""

from __future__ import annotations

import errno
import os
import pwd
from pathlib import Path

from relax_hpc.base.errors import EXIT_CONFIG, EXIT_RETRY

_DENIED = (errno.EACCES, errno.EPERM)
_SENTENCES = {
    errno.ENOENT: "there is no such file; see whether the name is right",
    errno.ENOTDIR: "a part of this path is a file, not a folder; name another path",
    errno.EISDIR: "is a folder, and a file is needed; name a file",
    errno.ELOOP: "its symbolic links lead in a circle; name the folder itself",
    errno.ENAMETOOLONG: "the name is too long for its file system; take a shorter one",
    errno.ESTALE: "the file server no longer knows it (stale handle); try again once it is mounted "
    "well",
}


def explain_path_error(error: OSError) -> str:
    """Sentence with the path, the cause and the remedy. Empty: ``error`` has no path, or another
    kind."""
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return ""
    path = Path(os.fsdecode(error.filename))
    if error.errno in _DENIED:
        return f"{path}: {_describe_denial(path)}"
    sentence = _SENTENCES.get(error.errno or 0, "")
    return f"{path}: {sentence}" if sentence else ""


def exit_code_of(error: OSError) -> int:
    """Exit code of a command that ``error`` ends. A retry can help if a file server has failed."""
    return EXIT_RETRY if error.errno == errno.ESTALE else EXIT_CONFIG


def check_may_change(folder: Path) -> None:
    """Raise PermissionError if this user may not write to ``folder``."""
    # If the file system is mounted read-only, a write fails with EROFS, which is waited for.
    read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    if not read_only and not os.access(folder, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def _describe_denial(path: Path) -> str:
    """Missing right, and the user who can grant it."""
    reached = _reached(path)
    needed = os.R_OK | os.X_OK if reached.is_dir() else os.R_OK
    # If every existing part of the path may be read, the denied access was a change.
    right = "write" if os.access(reached, needed) else "read"
    owner = f"it belongs to {_owner(reached)}"
    return f"not yours to {right} (permission denied); {owner}, or name another path"


def _reached(path: Path) -> Path:
    """``path``, or its nearest parent folder that this user can access."""
    for folder in (path, *path.absolute().parents):
        try:
            folder.stat()
        except OSError:
            continue
        return folder
    return Path("/")


def _owner(path: Path) -> str:
    number = path.stat().st_uid
    try:
        return f"{pwd.getpwuid(number).pw_name}, who can grant it"
    except KeyError:
        return f"user {number}, who can grant it"
