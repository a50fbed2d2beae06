"""Publication of weights by the trainer, and their readers."""
