"""The two processes for a program and its tests in Python, which communicate through a pipe.

The modules of this package are copied into jails. They only import the standard library and each
other.
"""
