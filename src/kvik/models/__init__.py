"""Architectures: a file for each or for a family, written with the layers of `nn`.

`registry.py` lists them. `model_spec.py` reads config.json by their facts; from what a network
declares come its parameters, the layers of the memory plan, the quantiser's folds and the names in
GGUF files. `draft_heads.py` has heads that draft.
"""
