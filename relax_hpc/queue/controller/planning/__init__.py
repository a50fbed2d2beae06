"""Decisions of the controller that depend only on its state."""
