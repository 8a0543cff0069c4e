"""Layers: what models are made of, how weights and the KV cache are stored and loaded.

`layers.py` and `rope.py` are the layers, `builder.py` makes them by the names of a checkpoint.
`checkpoint.py` is what is loaded from, with `safetensors.py`, `opening.py` which one a path is,
`loader.py` and `parts.py` the way of a weight into its matrix, `formats/` how checkpoints store a
layer, both ways. `kv_formats.py` allocates the cache. `storage.py` says where the memory of weights
comes from, `engine_folder.py` writes and maps engine folders, `gguf_blocks.py`,
`gguf_checkpoint.py` and `gguf_export.py` hold the values of GGUF files.
"""
