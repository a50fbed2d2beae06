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

PARTS = {"rate": ("rounds", "episodes", "at_once"), "idle": ("steps",), "endpoint": ("chats",)}
"""Parts, and what is said of each: a module agentic_PART measures it."""


def measured(folder: Path, given: argparse.Namespace) -> Iterator[Figure]:
    """Figures of all parts that are wanted."""
    for part in given.parts:
        (here := folder / part).mkdir()
        options = {name: getattr(given, name) for name in PARTS[part]}
        yield from importlib.import_module(f"agentic_{part}").measure(here, **options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--rounds",
        type=int,
        default=9,
        help="of episodes, and as many of the bare client's, by turns",
    )
    parser.add_argument("--episodes", type=int, default=128, help="of a round")
    parser.add_argument("--at_once", type=int, default=64, help="episodes at a time")
    parser.add_argument(
        "--steps", type=int, default=24, help="of the run against slow environments"
    )
    parser.add_argument("--chats", type=int, default=40, help="that agents hold at the endpoint")
    parser.add_argument("--json", action="store_true", help="end with one line of JSON")
    given = parser.parse_args()
    # Processes of environments find theirs beside this file too.
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [here, os.environ.get("PYTHONPATH", "")])
    )
    with tempfile.TemporaryDirectory() as folder:
        print_figures(measured(Path(folder), given), vars(given), given.json)


if __name__ == "__main__":
    main()
