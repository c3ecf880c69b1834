"""Checkpoints on disk: model.json, arrays by orbax, hashes, and folders that appear when they are whole."""
