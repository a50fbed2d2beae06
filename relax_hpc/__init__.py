"""Slurm-native reinforcement-learning post-training of language models."""

from relax_hpc.renamed_modules import install

__version__ = "0.2.0"

install()
