"""Compiled kernels of one node, kept in an archive on the shared filesystem for other nodes and
later jobs.

`key` names the archive, `archive` writes and reads it, `node` unpacks it once a node, and `keeper`
is the process that adds new kernels to it.
"""
