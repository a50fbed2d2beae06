"""Towers: encoders of media, transformers' modules, on the first pipeline stage before
megatron-core's decoder."""
