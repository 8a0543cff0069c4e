"""Offline quantisation: the methods of the papers as functions on tensors.

On tensors: `quantised.py` has the grid, the codes and FP8 values of a layer, `gptq.py` rounds
column by column, `factors.py` collects calibration statistics, and finds and folds factors of
inputs (AWQ, SmoothQuant). Over a model: `recipe.py` has the user's settings, `calibrate.py` goes
from block to block (`model_blocks.py`, `block.py`, `methods.py`), `budget.py` spends bits by
sensitivity. Into a folder: `source.py` is the model, `save.py` writes the keys, tensors and shards
of the ecosystem, and continues an interrupted run.
"""
