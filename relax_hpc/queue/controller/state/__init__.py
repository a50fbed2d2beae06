"""State of the queue, and how each record of the journal changes it."""
