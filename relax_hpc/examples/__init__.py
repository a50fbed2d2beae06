"""The folder `examples/` of a checkout, as the package `relax_hpc.examples`."""

from pathlib import Path

# setup.py installs examples/ as this package. In a checkout that folder lies at the top, where
# readers look for it. This file stands in for it there: the search path of the package names the
# folder. Wheels do not contain this file.
__path__ = [str(Path(__file__).resolve().parents[2] / "examples")]
