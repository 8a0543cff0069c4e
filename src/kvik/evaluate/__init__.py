"""How well a model reads a text, as the engine computes it, and how far from another model.

`windows.py` cuts texts and runs them on a loaded model, `quality.py` computes perplexity and the
distance from a reference model that reads the same text. `entropy.py` measures how far the
attention of each layer is spread.
"""
