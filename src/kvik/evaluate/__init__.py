"""Perplexity of a model as the engine computes it, and its distance from another model.

`windows.py` cuts texts into windows and runs them on a loaded model, `quality.py` computes
perplexity and the distance from a reference model on the same text. `entropy.py` measures how
widely the attention of each layer is spread.
"""
