"""Models: the shell, the families, weights and tokenizers on disk."""
