"""SGLang as an engine: its server process, requests, and updates of weights."""
