"""Errors, fields, run directories, metrics and small helpers, which all other packages use."""
