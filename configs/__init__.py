"""Plain frozen dataclasses: architectures, meshes, precision, options. Nothing here imports JAX."""

if __name__ != "treering.configs":
    # As a package of its own it would be a second copy, with second classes of every name.
    raise ImportError("import treering.configs, and take the root of Treering's repository off sys.path")
