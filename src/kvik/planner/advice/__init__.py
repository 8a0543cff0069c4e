"""What to change about serving a model on a machine, and what that brings."""
