"""Models: the shell, the families, weights and tokenizers on disk."""

if __name__ != "treering.models":
    # As a package of its own it would be a second copy, with second classes of every name.
    raise ImportError("import treering.models, and take the root of Treering's repository off sys.path")
