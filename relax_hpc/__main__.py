"""`python -m relax_hpc` is `relax-hpc`."""

import sys

from relax_hpc.commands.program import main

sys.exit(main())
