"""Store what the tests reported that `torch_releases.sh` ran.

    python tools/nightly/torch_reports.py --out FILE FOLDER...

A folder is an environment with the report of pytest, `report.xml`. Exit code 1: a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

PACKAGES = ("torch", "triton", "torchvision", "megatron-core", "transformers", "numpy")
ROOT = Path(__file__).resolve().parents[2]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("folders", type=Path, nargs="+")
    options = parser.parse_args()
    releases = [read_environment(folder) for folder in options.folders]
    result = {
        "commit": run("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"),
        "date": datetime.date.today().isoformat(),
        "machine": f"{platform.machine()}, Python {platform.python_version()}",
        "releases": releases,
    }
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    for release in releases:
        print(
            f"torch {release['versions']['torch']}: {release['passed']} passed", *release["failed"]
        )
    return int(any(release["failed"] for release in releases))


def read_environment(folder: Path) -> dict[str, Any]:
    """Versions of an environment, and results of its tests."""
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    by_file: Counter[str] = Counter()
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        outcome = kinds.pop() if kinds else "passed"
        outcomes[outcome] += 1
        file = case.get("classname", "").replace(".", "/") + ".py"
        if outcome == "passed":
            by_file[file] += 1
        elif outcome != "skipped":
            failed.append(f"{file}::{case.get('name')}")
    return {
        "versions": read_versions(folder),
        "passed": outcomes["passed"],
        "skipped": outcomes["skipped"],
        "failed": sorted(failed),
        "passed_by_file": dict(sorted(by_file.items())),
    }


def read_versions(folder: Path) -> dict[str, str]:
    """Versions of `PACKAGES` in an environment."""
    program = (
        "import json, sys; from importlib.metadata import version; "
        "print(json.dumps({name: version(name) for name in sys.argv[1:]}))"
    )
    return json.loads(run(str(folder / "bin/python"), "-c", program, *PACKAGES))


def run(*command: str) -> str:
    """Output of a command."""
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
