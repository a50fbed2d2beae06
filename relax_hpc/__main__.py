"""`python -m relax_hpc` is `relax-hpc`."""

import sys

from relax_hpc.cli import main

sys.exit(main())
