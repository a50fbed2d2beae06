"""Processes for work that may hang, crash or take too much memory: what does is killed and
replaced, and costs what it was at alone."""
