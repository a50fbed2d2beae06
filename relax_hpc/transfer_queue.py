"""Import path of earlier releases for `relax_hpc.queue`, which files of users may have."""

from relax_hpc.queue import *  # noqa: F403
