"""Weights and tokenizers as other tools write them: safetensors folders, GGUF, Meta's folders."""
