"""What episodes of many turns cost: their rate and their cache against a bare client, how idle
engines are while environments are slow, and the endpoint of agent programs.

    python tools/bench/agentic.py --parts rate idle endpoint --json
"""

from __future__ import annotations

import argparse
import importlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from figures import Figure, print_figures

PARTS = {"rate": ("rounds", "episodes", "concurrency"), "idle": ("steps",), "endpoint": ("chats",)}
"""Options of each part, which a module agentic_PART measures."""


def measure_parts(folder: Path, options: argparse.Namespace) -> Iterator[Figure]:
    """Figures of all selected parts."""
    for name in options.parts:
        scratch = folder / name
        scratch.mkdir()
        arguments = {option: getattr(options, option) for option in PARTS[name]}
        yield from importlib.import_module(f"agentic_{name}").measure(scratch, **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="rounds of episodes, each followed by a round of the bare client",
    )
    parser.add_argument("--episodes", type=int, default=128, help="episodes of a round")
    parser.add_argument("--concurrency", type=int, default=64, help="episodes at the same time")
    parser.add_argument(
        "--steps", type=int, default=24, help="steps of the run with slow environments"
    )
    parser.add_argument("--chats", type=int, default=40, help="chats of agents at the endpoint")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    options = parser.parse_args()
    # Processes of environments import modules of this folder too.
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    with tempfile.TemporaryDirectory() as folder:
        print_figures(measure_parts(Path(folder), options), vars(options), options.json)


if __name__ == "__main__":
    main()
