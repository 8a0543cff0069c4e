"""Offline quantisation: the methods of the papers as functions on tensors."""
