"""GGUF files: their metadata, without torch; `nn` decodes the values of tensors.

`reader.py` reads and validates the head of a file, and writes files. `types.py` has the types of
blocks and metadata, `facts.py` translates a model's metadata to the keys of config.json, `rope.py`
its rotary positions; `names.py` maps names of tensors, and `tokenizer.py` builds the tokenizer.
`export.py` is the inverse.
"""
