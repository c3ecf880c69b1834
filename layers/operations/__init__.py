"""Attention operations of a forward pass, each a `layers.nn.attention.AttentionOperation`.

`context` is that of training, `paged` that of the KV cache in `pool`, `dense` the definition. A new cache, or
another way for queries to meet keys, is a module here.
"""
