"""From sources of text to batches: tokenising, packing, mixing."""
