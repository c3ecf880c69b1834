"""The layers of a model as Equinox modules, and the weights that they multiply by. A new layer is a module here."""
