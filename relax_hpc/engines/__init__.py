"""Import path of earlier releases for `relax_hpc.rollout.engines`, which files of users may
have."""
