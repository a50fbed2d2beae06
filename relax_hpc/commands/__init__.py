"""The command line `relax-hpc` and the programs that start and end runs."""
