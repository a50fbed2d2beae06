"""The HTTP service of a run: operations on its engines, its state, and its metrics"""
