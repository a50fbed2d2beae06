"""Import path of earlier releases for `relax_hpc.rollout.engines.engine`."""

from relax_hpc.rollout.engines.engine import *  # noqa: F403
