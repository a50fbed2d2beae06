"""Emulation for CPUs: replacements that megatron-core and torch.distributed need without a GPU."""
