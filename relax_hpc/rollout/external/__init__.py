"""External engines: SGLang servers that other programs started, and that join a running run.

`membership` follows which engines should serve, and `member` runs one of them: it joins, is lost,
and is retried. `preflight` compares an engine with the run before it gets requests. Each fault of
an external engine ends in leaving: other engines continue its work, and the role continues.
"""
