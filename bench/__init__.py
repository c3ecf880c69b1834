"""Scripts that measure. Each runs from the root of the repository: `python -m bench.NAME`."""
