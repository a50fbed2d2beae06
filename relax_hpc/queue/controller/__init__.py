"""The controller of the queue: it decides, journals and answers."""
