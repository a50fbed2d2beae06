"""Conversion of models between Hugging Face and megatron-core."""
