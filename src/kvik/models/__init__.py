"""Model architectures: one file per architecture or family, written with the layers of `nn`.

`decoder.py` has the parts of most of them, and `registry.py` lists them. `model_spec.py` reads
config.json by their facts. The layers that a network declares determine its number of parameters,
the layers of the memory plan, the quantiser's folds and the names in GGUF files. `draft_heads.py`
has draft heads.
"""
