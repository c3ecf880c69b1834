"""Training: data, loss, step, optimizer and run. Nothing is here yet."""

if __name__ != "treering.train":
    # As a package of its own it would be a second copy, with second classes of every name.
    raise ImportError("import treering.train, and take the root of Treering's repository off sys.path")
