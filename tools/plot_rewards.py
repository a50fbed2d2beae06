"""Plots training reward and held-out scores of one or several runs into one picture."""

from __future__ import annotations

import argparse
import sys

from relax_hpc.base.errors import RelaxError
from relax_hpc.base.metrics.plot import main

EXAMPLES = """examples:
  python tools/plot_rewards.py runs/quickstart
  python tools/plot_rewards.py runs/sync runs/async -o compare.pdf --tag 'idle/*'
"""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The command line; exits with the usage when it is wrong."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs="+", metavar="RUN", help="run directory; several are drawn over one another"
    )
    parser.add_argument(
        "-o",
        "--output",
        default="rewards.png",
        help="picture to write: .png, .pdf or .svg (%(default)s)",
    )
    parser.add_argument(
        "--tag",
        action="append",
        default=[],
        help="one more panel: a tag, or a pattern such as 'idle/*'",
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = parse(sys.argv[1:])
    try:
        sys.exit(main(options.runs, options.output, options.tag))
    except RelaxError as error:
        print(f"plot_rewards: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
