"""`python -m machine`, with `relax_hpc/base` in PYTHONPATH: compare this machine with a lock.

Prints one line for each requirement that is not met. Exit code 78: one of them is fatal.
"""

import argparse
import sys
from pathlib import Path

from .facts import facts_from_json, facts_to_json, read_facts
from .requirements import GPU, INSTALLATION, PROGRAMS, find_problems, read_needs

_EXIT_CONFIG = 78
"""As `relax_hpc.base.errors.EXIT_CONFIG`, which is not imported here: it needs a newer Python."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="machine", description=__doc__)
    parser.add_argument("--needs", metavar="FILE", help="env/requirements-cpu.json or -gpu.json")
    parser.add_argument("--use", action="append", default=[], choices=(INSTALLATION, GPU, PROGRAMS))
    parser.add_argument("--disk", default="", help="folder of the installation")
    parser.add_argument(
        "--facts", metavar="FILE", help="facts of another machine in place of own ones"
    )
    parser.add_argument(
        "--ignore-python", action="store_true", help="another one will be installed"
    )
    parser.add_argument("--print-facts", action="store_true", help="print facts as JSON, and end")
    arguments = parser.parse_args()
    try:
        facts = read_facts(
            arguments.disk, with_driver=arguments.print_facts or GPU in arguments.use
        )
        if arguments.facts:
            facts = facts_from_json(Path(arguments.facts).read_text(encoding="utf-8"), facts)
        needs = read_needs(Path(arguments.needs)) if arguments.needs else {}
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        return _EXIT_CONFIG
    except ValueError as error:
        print(f"{arguments.facts or arguments.needs}: {error}")
        return _EXIT_CONFIG
    if arguments.print_facts:
        print(facts_to_json(facts))
        return 0
    if arguments.ignore_python:
        facts = facts._replace(python="")
    problems = find_problems(facts, needs, arguments.use)
    for problem in problems:
        print(problem)
    return _EXIT_CONFIG if any(problem.is_fatal for problem in problems) else 0


if __name__ == "__main__":
    sys.exit(main())
