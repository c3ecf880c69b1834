"""Training: one step on any mesh, what it reads, and the run around it.

    from treering.train.run.loop import train

    outcome = train(config)  # a RunConfig, as recipes in treering.configs.recipes return it

step.py       a step: forward, loss, gradients, update (with loss.py and optim.py)
evaluate.py   loss on held-out rows, by position in the document
data/         from sources of text to batches: tokenising, packing, mixing
run/          the loop of a run, its folder, checkpoints and metrics
commands/     `treering train` and `treering plot`
"""

if __name__ != "treering.train":
    # As a package of its own it would be a second copy, with second classes of every name.
    raise ImportError("import treering.train, and take the root of Treering's repository off sys.path")
