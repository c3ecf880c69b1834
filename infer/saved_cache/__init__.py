"""Saved caches: a row of the KV cache as a folder, and back onto any mesh."""
