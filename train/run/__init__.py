"""A training run: its loop, folder, checkpoints, metrics, and what watches it."""
