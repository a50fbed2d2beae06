"""Real containers for tests: a program that takes Apptainer's words and makes them with bubblewrap.

Inside there are this machine's programs, the image's folders, what was bound, and nothing else: no
home, no checkout, no /tmp. An image is a folder with `folders.json`: path inside -> path here.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

PYTHON = "/opt/toolkit/bin/python"
"""Inside an image of ours; there is no such program outside."""
_SYSTEM = ("/usr", "/etc", "/sys")
_LINKS = {"/bin": "usr/bin", "/sbin": "usr/sbin", "/lib": "usr/lib", "/lib64": "usr/lib64"}


def install(folder: Path) -> Path:
    """The program, in ``folder``; each of its calls is a line of `calls` there."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "singularity"
    code = (
        f"import runpy\nrunpy.run_path({__file__!r}, {{'FOLDER': {str(folder)!r}}}, '__main__')\n"
    )
    program.write_text(f"#!{sys.executable}\n{code}")
    program.chmod(0o755)
    return program


def make_image(folder: Path, python: bool = True) -> Path:
    """An image with this environment's interpreter and packages, or without any."""
    folder.mkdir(parents=True)
    folders = {"/opt/toolkit": sys.prefix} if python else {}
    if python and not sys.base_prefix.startswith("/usr"):
        folders[sys.base_prefix] = sys.base_prefix
    (folder / "folders.json").write_text(json.dumps(folders))
    return folder


def bubblewrap(words: list[str]) -> list[str]:
    """`exec [--no-home] [--nv] [--bind=PATH[:INSIDE]]... IMAGE COMMAND...` in bubblewrap's
    words."""
    if words[:1] != ["exec"]:
        raise SystemExit(f"container: found {words[:1]}, allowed: exec")
    found = ["bwrap", "--die-with-parent", "--proc", "/proc", "--dev-bind", "/dev", "/dev"]
    for path in _SYSTEM:
        found += ["--ro-bind", path, path]
    for name, target in _LINKS.items():
        found += ["--symlink", target, name]
    rest, binds = words[1:], []
    while rest[0].startswith("--"):
        word = rest.pop(0)
        if word.startswith("--bind="):
            here, _, inside = word.removeprefix("--bind=").partition(":")
            binds += ["--bind", here, inside or here]
        elif word not in ("--no-home", "--nv"):
            raise SystemExit(f"container: unknown option {word}")
    image = Path(rest.pop(0))
    for inside, here in json.loads((image / "folders.json").read_text()).items():
        found += ["--ro-bind", here, inside]
    return [*found, *binds, "--setenv", "CONTAINER", str(image), "--chdir", "/", "--", *rest]


if __name__ == "__main__":
    with (Path(globals()["FOLDER"]) / "calls").open("a") as calls:
        calls.write(json.dumps(sys.argv[1:]) + "\n")
    command = bubblewrap(sys.argv[1:])
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
        # bubblewrap stays the parent, and a signal to the group is the program's, which sets its
        # own handlers.
        signal.signal(number, signal.SIG_IGN)
    os.execvp(command[0], command)
