"""`python -m relax_hpc.sandbox`."""

import sys

from relax_hpc.sandbox.command import run

sys.exit(run())
