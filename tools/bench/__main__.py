"""Run a benchmark, and store its figures for the documentation.

    python tools/bench                                   list the benchmarks
    python tools/bench samples --tokens 2048             run one; --help explains its options
    python tools/bench samples --tokens 2048 --store     also write tools/docs/results/samples.json
    python tools/bench routing_replay cost --store routing_replay_cost

Each benchmark is a program of this folder, and may also be started alone. With --json its last line
is the result: {"figures": [{name, value, unit, target, ok, rounds}], "settings": {...}}.
docs/benchmarks/index.md explains how to run and store one. Exit code: that of the benchmark.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
DOCS = FOLDER.parent / "docs"
NEEDS_OPTIONS = {
    "before_after": "CHECKOUT",
    "convergence": "--keep DIR",
    "long_run": "CONFIG --keep DIR",
    "plain_loop": "--run_dir RUN",
}
"""Options that a benchmark cannot run without."""


def benchmarks() -> dict[str, Path]:
    """Name of each benchmark -> its program: a module, or a folder with a `__main__.py`."""
    programs = {path.stem: path for path in FOLDER.glob("*.py") if path.stem != "__main__"}
    programs |= {path.parent.name: path for path in FOLDER.glob("*/__main__.py")}
    return {
        name: path
        for name, path in sorted(programs.items())
        if 'if __name__ == "__main__":' in path.read_text()
    }


def summary(program: Path) -> str:
    """First paragraph of a program's docstring, in one line."""
    text = ast.get_docstring(ast.parse(program.read_text())) or ""
    return " ".join(text.partition("\n\n")[0].split())


def main() -> int:
    programs = benchmarks()
    name, *options = sys.argv[1:] or [""]
    if name in ("", "-h", "--help"):
        print(__doc__)
        for each, program in programs.items():
            print(f"{each} {NEEDS_OPTIONS.get(each, '')}".ljust(26), summary(program))
        return 0
    if name not in programs:
        print(f"tools/bench: found {name!r}, allowed: {', '.join(programs)}", file=sys.stderr)
        return 78
    if "--store" not in options:
        return subprocess.run([sys.executable, str(programs[name]), *options]).returncode
    position = options.index("--store")
    stored_as = options[position + 1] if position + 1 < len(options) else name
    del options[position : position + 2]
    return run_and_store(name, programs[name], options, stored_as)


def run_and_store(name: str, program: Path, options: list[str], stored_as: str) -> int:
    """Run a benchmark, show what it prints, and store its last line as a result."""
    command = [sys.executable, str(program), *options, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        last_line = ""
        for line in process.stdout:
            print(line, end="", flush=True)
            last_line = line
    sys.path.insert(0, str(DOCS))
    from benchmarks import RESULTS, stored

    try:
        result = stored(last_line, " ".join(["python tools/bench", name, *options]))
    except (ValueError, IndexError) as error:
        print(f"tools/bench: {name} ended without a result: {error}", file=sys.stderr)
        return process.returncode or 1
    path = RESULTS / f"{stored_as}.json"
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    print(f"stored as {path.relative_to(FOLDER.parents[1])}; now run: python tools/docs")
    return process.returncode


if __name__ == "__main__":
    sys.exit(main())
