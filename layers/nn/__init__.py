"""The layers of a model as Equinox modules, and the weights that they multiply by."""
