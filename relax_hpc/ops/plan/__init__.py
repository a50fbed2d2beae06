"""Memory of a run, calculated before it is submitted; docs/reference/memory.md has the formulas.

Nothing is measured, and torch is not needed: sizes follow from the configuration and the model's
config.json.
"""
