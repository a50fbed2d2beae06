"""Shipped sizes of clusters and example sites, as configurations for tests."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from relax_hpc.config import Config, load

ROOT = Path(__file__).resolve().parents[2]
SIZES = sorted(
    (ROOT / "configs" / "clusters").glob("*-nodes*.yaml"),
    key=lambda path: (len(path.stem), path.stem),
)
SITES = sorted((ROOT / "configs" / "sites").glob("*.yaml"))
FOUR_NODES = ROOT / "configs/clusters/4-nodes.yaml"


def nodes_of(size: Path) -> int:
    """Number of nodes in the name of a size."""
    return int(size.stem.split("-")[0])


def gpus_of(size: Path) -> int:
    """GPUs of a node: 8, or the number after `-of-` in the name."""
    return int(size.stem.partition("-of-")[2] or 8)


def sizes_of(site: Path) -> list[Path]:
    """Sizes with the nodes of a site, whose number of GPUs is in its first line."""
    first_line = site.read_text().splitlines()[0]
    gpus = re.search(r"nodes of (\d)", first_line)
    assert gpus, f"{site.name}: the first line must name the GPUs of a node"
    return [size for size in SIZES if gpus_of(size) == int(gpus[1])]


def compose(size: Path, layout: str, site: Path | None = None, **overrides: Any) -> Config:
    """Configuration of a run of `size` in `layout`, with settings of an example site."""
    values = {
        "name": "demo",
        "run_dir": "/scratch/demo",
        "layout": layout,
        "site.python": "/opt/relax/bin/python",
    }
    return load([size, *([site] if site else [])], values | overrides)
