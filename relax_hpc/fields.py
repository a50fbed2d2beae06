"""Import path of earlier releases for `relax_hpc.base.fields`, which files of users may have."""

from relax_hpc.base.fields import *  # noqa: F403
