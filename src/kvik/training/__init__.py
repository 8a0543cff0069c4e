"""Training of draft heads on a model that stays as it is.

`states.py` is what they learn from, `train.py` the steps, accuracies and what continues after an
interruption, `heads.py` the way from text to a folder.
"""
