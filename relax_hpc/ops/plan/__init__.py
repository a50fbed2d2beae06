"""Memory that a run will take, worked out before it waits in a queue; docs/reference/memory.md has
the formulas.

Nothing here is measured, and nothing needs torch: sizes follow from the configuration and the
model's config.json.
"""
