"""Emulation: what megatron-core and torch.distributed need in order to run without a GPU."""
