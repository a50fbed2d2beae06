"""The two processes of a program and of its tests written in Python, which talk through a pipe.

The modules of this package are copied into jails. They import the standard library and each other
alone.
"""
