"""Generation: the engine, sampling, and the scripts around it."""

if __name__ != "treering.infer":
    # As a package of its own it would be a second copy, with second classes of every name.
    raise ImportError("import treering.infer, and take the root of Treering's repository off sys.path")
