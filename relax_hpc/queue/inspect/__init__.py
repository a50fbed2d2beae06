"""Commands that read the queue of a run: events, rows and the audit."""
