"""Writes slurm/<size>.sbatch, one for each file of configs/clusters; `--check` only says which are
not up to date.

`--site my-site.yaml --folder my-scripts` writes them for a site instead: its account, partitions,
way to ask for GPUs, modules and setup, which no environment variable can put into #SBATCH lines.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from relax_hpc.base.errors import ConfigError
from relax_hpc.cluster.slurm.render import render_size
from relax_hpc.config import load

ROOT = Path(__file__).resolve().parent.parent


def texts(folder: Path = ROOT / "slurm", site: Path | None = None) -> dict[Path, str]:
    """Every file of ``folder`` with the text it should have; sizes that ``site`` cannot have are
    named and left out."""
    found = {}
    for path in sorted((ROOT / "configs" / "clusters").glob("*-nodes*.yaml")):
        try:
            config = load([path, *([site] if site else [])])
            found[folder / f"{path.stem}.sbatch"] = render_size(
                config, str(path.relative_to(ROOT)), site
            )
        except ConfigError as problem:
            if not site:
                raise
            print(f"left out: {path.stem}: {problem}", file=sys.stderr)
    return found


def main(arguments: list[str]) -> int:
    """Write the files, or with --check name those that differ; 1 if any did."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--site", type=Path, help="write them for this site; give a --folder too")
    parser.add_argument("--folder", type=Path, help="where to write them")
    given = parser.parse_args(arguments)
    if bool(given.site) != bool(given.folder):
        parser.error("--site and --folder: found one, allowed: both or none")
    folder, site = given.folder or ROOT / "slurm", given.site.absolute() if given.site else None
    wanted = texts(folder, site)
    stale = {
        path: text
        for path, text in wanted.items()
        if not path.is_file() or path.read_text() != text
    }
    for path, text in stale.items():
        print(
            f"{'differs' if given.check else 'written'}: "
            f"{path.relative_to(ROOT) if folder.parent == ROOT else path}"
        )
        if not given.check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
    return int(given.check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
