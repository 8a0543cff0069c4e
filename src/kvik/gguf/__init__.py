"""GGUF files: what they say of a model, without torch; the values are for `nn`.

`reader.py` reads the head and checks it completely, `types.py` knows blocks and metadata,
`facts.py` says the model in the words of config.json, `rope.py` its rotary positions; `names.py`
maps names of tensors, and `tokenizer.py` makes the tokenizer.
`writer.py` and `export.py` go the other way.
"""
