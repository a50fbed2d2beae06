"""Examples in docstrings are correct: all of the package run in one process."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from types import ModuleType

import relax_hpc

FEWEST_EXAMPLES = 150
"""The package has more docstrings with examples than this."""


def test_examples_in_docstrings_are_correct() -> None:
    """They run in a process of their own: they import all modules, with torch and megatron-core."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.project.test_doctests"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def modules() -> Iterator[ModuleType]:
    """Import each module of the package, except programs."""
    for info in pkgutil.walk_packages(relax_hpc.__path__, "relax_hpc."):
        if not info.name.endswith("__main__"):
            yield importlib.import_module(info.name)


def run_examples() -> int:
    """Run the examples of all modules, print those that fail, and return the exit code."""
    warnings.simplefilter("ignore")
    finder, runner = doctest.DocTestFinder(), doctest.DocTestRunner()
    count = 0
    for module in modules():
        for test in finder.find(module):
            if test.examples:
                count += 1
                runner.run(test)
    if count < FEWEST_EXAMPLES:
        print(f"only {count} docstrings with examples, expected at least {FEWEST_EXAMPLES}")
    return 0 if runner.failures == 0 and count >= FEWEST_EXAMPLES else 1


if __name__ == "__main__":
    sys.exit(run_examples())
