"""Plain frozen dataclasses: architectures, meshes, precision, options. Nothing here imports JAX."""
