"""Attention algorithms that serve any model: a library that imports nothing of ours but itself.

They take arrays, a mask and a mesh. `mask` says which keys a query sees, `partial` is the algebra that all of them
fold, `dense` is the definition, `local` runs on one device, `distributed` over a mesh axis.

A new kernel goes into `kernels` and is chosen there. A new algorithm over devices goes into `distributed`, as a
function for use inside `shard_map` and one of global arrays around it (`distributed.global_arrays`). Another way to
restrict keys goes into `mask`, another order of tokens over devices into `order`.
"""
