"""Emulation of the parts that SGLang needs to run without a GPU."""
