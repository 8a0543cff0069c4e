"""The layers of models, and how weights and the KV cache are stored and loaded.

`layers.py` and `rope.py` are the layers, `builder.py` creates them by the names of a checkpoint,
and `feed_forward.py` MLPs and experts; `parameters.py` allocates what they hold. `checkpoint.py`
reads weights from folders (files: `safetensors.py`), `gguf_checkpoint.py` from GGUF files;
`lora.py` reads adapters. `loader.py` and `parts.py` load a weight into its matrix, `formats/` reads
and writes the storage formats of a layer. `kv_formats.py` allocates the cache and states,
`pages.py` copies blocks of it. `engine_folder.py` writes and maps engine folders; `gguf_blocks.py`
decodes and `gguf_export.py` encodes the values of GGUF files.
"""
