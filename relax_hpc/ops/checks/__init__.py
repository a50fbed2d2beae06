"""Checks of a configuration that need no other machine and start nothing."""
