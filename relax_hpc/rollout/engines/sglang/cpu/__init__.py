"""Emulation: what SGLang needs in order to run without a GPU."""
