"""Worker processes for work that may hang, crash or use too much memory.

A worker that fails is killed and replaced. Only the requests that it was working on are lost.
"""
