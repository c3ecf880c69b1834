"""Attention algorithms that serve any model: a library that imports nothing of ours but itself.

They take arrays, a mask and a mesh. `mask` says which keys a query sees, `partial` is the algebra that all of them
fold, `local` runs on one device with the kernels of `kernels`, `distributed` over a mesh axis; `dense` is the
definition.
"""
