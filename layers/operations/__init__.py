"""The attention operations that a forward pass is given: over a training batch, over the paged KV cache, dense."""
