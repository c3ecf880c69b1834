"""Attention over a sequence that is sharded over a mesh axis: ring, gather and tree."""
