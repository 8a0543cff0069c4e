"""How well a model reads a text, as the engine computes it, and how far from another model.

`windows.py` cuts texts and runs them on a loaded model, `quality.py` is perplexity and the distance
from a reference that reads the same, from the distributions of `distributions.py`. `bar.py` shows
how far it is.
"""
