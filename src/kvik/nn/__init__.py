"""Layers: what models are made of, how weights and the KV cache are stored and loaded."""
