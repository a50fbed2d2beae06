"""Saved state of a trainer: saving, loading, and the metadata of a checkpoint."""
