"""GGUF files: what they say of a model, without torch; the values are for `nn`."""
