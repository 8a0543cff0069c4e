"""How well a model reads a text, as the engine computes it, and how far from another model."""
