"""The trainer: batches, the training step, models, weights and checkpoints."""
