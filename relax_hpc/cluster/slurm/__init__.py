"""Slurm: its commands, and the jobs and steps of a run."""
