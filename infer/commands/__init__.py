"""The commands `treering generate` and `treering chat`."""
