"""Examples to read and to copy; configurations name them as `relax_hpc.examples.MODULE:NAME`."""
