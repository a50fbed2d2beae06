"""Slurm jobs and steps, and the supervision of the groups of a run."""
