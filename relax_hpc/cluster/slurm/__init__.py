"""Slurm: its commands, what a run asks of it, and what is handed to it."""
