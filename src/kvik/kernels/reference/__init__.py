"""The plain-torch meaning of every operation. Slow on purpose where that is clearer."""
