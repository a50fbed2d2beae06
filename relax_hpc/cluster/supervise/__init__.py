"""Supervision of a run's groups, the same in every layout."""
