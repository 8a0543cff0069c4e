"""The engine around the core: one step loop, who computes its plans, and who reads its results."""
