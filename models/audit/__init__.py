"""Comparing and describing models: against transformers, against our own checks, the zoo's table."""
