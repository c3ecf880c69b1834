"""Devices: the sharding plan, meshes, and programs that are compiled ahead of time."""
