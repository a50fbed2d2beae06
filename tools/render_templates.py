"""Writes slurm/<size>.sbatch, one for each file of configs/clusters; `--check` only says which are not up to date."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relax_hpc.config import load
from relax_hpc.launch.slurm.render import render_size

ROOT = Path(__file__).resolve().parent.parent


def texts() -> dict[Path, str]:
    """Every shipped file with the text it should have."""
    sizes = sorted((ROOT / "configs" / "clusters").glob("*-nodes*.yaml"))
    return {
        ROOT / "slurm" / f"{path.stem}.sbatch": render_size(load([path]), str(path.relative_to(ROOT))) for path in sizes
    }


def main(arguments: list[str]) -> int:
    """Write the files, or with --check name those that differ; 1 if any did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args(arguments).check
    stale = {path: text for path, text in texts().items() if not path.is_file() or path.read_text() != text}
    for path, text in stale.items():
        print(f"{'differs' if check else 'written'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text)
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
