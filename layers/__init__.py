"""Layers as Equinox modules, the attention algorithms, and the sharding plan."""
