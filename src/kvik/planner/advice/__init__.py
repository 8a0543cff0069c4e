"""Advice on serving a model on a machine: what to change, and the predicted effect."""
