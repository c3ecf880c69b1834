"""The commands `treering convert`, `export`, `verify`, `zoo` and `check`."""
