"""Training of draft heads on a model that stays as it is.

`train.py` is what they learn from, the steps, accuracies and what continues after an interruption,
`heads.py` the way from text to a folder.
"""
