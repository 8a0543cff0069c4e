"""Guesses at the next tokens of running requests, which the model then checks many at a time."""
