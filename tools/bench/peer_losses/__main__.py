"""Losses, gradients and advantages of this project against the functions of TRL, verl and slime
themselves.

    pip install --no-deps --target PEERS trl verl accelerate datasets pandas multiprocess xxhash
    tensordict pyvers ray \
        omegaconf antlr4-python3-runtime==4.9.3 codetiming hydra-core cloudpickle python-dateutil
    PYTHONPATH=PEERS:SLIME python tools/bench/peer_losses

SLIME is a checkout of slime, which PyPI does not have. Their own dependencies stay out, so that
torch and transformers are this project's. In float64, over random batches; a figure is the largest
difference over the largest number of an answer (a loss and its gradient, or advantages). A peer
that is not there is said, and the exit code is 1; so it is where a figure is over its target.
`--peers trl verl` asks for these alone.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import ModuleType

sys.path.insert(0, str(Path(__file__).parents[1]))
# slime's functions are compiled when they are first called, which takes minutes and changes no
# number.
os.environ["TORCHDYNAMO_DISABLE"] = "1"

import of_slime
import of_trl
import of_verl
import torch
from cases import Case, draw, farthest
from figures import Figure, print_figures

from relax_hpc.algorithms import ALGORITHMS
from relax_hpc.base.transformers_hook import install_transformers_hook

PEERS: dict[str, ModuleType] = {"trl": of_trl, "verl": of_verl, "slime": of_slime}


def main() -> int:
    """Compare with those that are installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--batches", type=int, default=100)
    parser.add_argument("--json", action="store_true", help="one object as the last line")
    args = parser.parse_args()
    torch.set_num_threads(1)
    install_transformers_hook()
    cases = [draw(seed) for seed in range(args.batches)]
    missing: list[str] = []
    compared: set[str] = set()
    settings = {"batches": args.batches, "device": "cpu"} | {
        name: release(name) for name in args.peers
    }
    figures = print_figures(compare(args.peers, cases, missing, compared), settings, args.json)
    return 0 if not missing and all(figure.ok for figure in figures) else 1


def compare(
    peers: list[str], cases: list[Case], missing: list[str], compared: set[str]
) -> Iterator[Figure]:
    """Figures of those that are there; the others are added to ``missing``, algorithms to
    ``compared``."""
    for name in peers:
        try:
            importlib.import_module(PEERS[name].MODULE)
        except ImportError as error:
            missing.append(name)
            print(
                f"{name}: nothing is compared, its {PEERS[name].MODULE} cannot be imported: {error}"
            )
            continue
        for one in PEERS[name].comparisons():
            compared.add(one.algorithm)
            found, target = (
                farthest(one, cases),
                f"<= {one.tolerance:g}" + (f", {one.why}" if one.why else ""),
            )
            yield Figure(
                f"{name}: {one.algorithm}: {one.what}", found, "", target, found <= one.tolerance
            )
    if alone := sorted(set(ALGORITHMS) - compared):
        print(f"compared with nobody: {', '.join(alone)}")


def release(name: str) -> str:
    """Version of an installed package; of a checkout, that it is one."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "no package"


if __name__ == "__main__":
    sys.exit(main())
