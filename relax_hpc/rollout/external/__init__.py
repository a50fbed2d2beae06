"""External engines: SGLang servers that other programs started, and that join a running run.

`membership` follows which engines should serve, and `member` runs one of them: it joins, is lost,
and is retried. `preflight` compares an engine with the run before it gets requests. Each fault of
an external engine ends in leaving: other engines continue its work, and the role continues.
"""

MEMBER_FILES, MEMBER_FETCH = "/member/files", "/member/fetch"
"""Paths that the member process of an engine answers itself: a description of the engine's model
files, and a request to fetch a version."""
