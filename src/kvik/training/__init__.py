"""Training of draft heads for a model, which is not changed.

`train.py` has the training data, steps, accuracies and snapshots, `heads.py` the heads and the way
from a text to a saved folder.
"""
