"""The commands `treering train` and `treering plot`."""
