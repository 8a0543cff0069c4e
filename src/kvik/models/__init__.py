"""Architectures: one file each, written with the layers of `nn` and read like the paper.

`registry.py` lists them. `model_spec.py` reads config.json by their facts; from what a network
declares come its parameters, the layers of the memory plan, the quantiser's folds and the names in
GGUF files. `public.py` knows the configurations of public models. `medusa.py` and `eagle.py` are
heads that draft.
"""
