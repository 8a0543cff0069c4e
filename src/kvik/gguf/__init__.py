"""GGUF files: what they say of a model, without torch; the values are for `nn`.

`reader.py` reads the head, checks it completely, and writes files, `types.py` knows blocks and
metadata, `facts.py` says the model in the words of config.json, `rope.py` its rotary positions;
`names.py` maps names of tensors, and `tokenizer.py` makes the tokenizer. `export.py` goes the other
way.
"""
