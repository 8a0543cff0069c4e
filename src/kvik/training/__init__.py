"""Training of draft heads on a model that stays as it is."""
