"""Facts that both trunks read: torch-free, and about nothing but themselves.

`model.py` is a model's sizes, `declare.py` what an architecture is and the vocabulary its network
is declared with, made by `nn/builder.py` or only listed. `weight_kind.py` says how a weight is
stored in memory, `weights.py` which layers become what, `stored_weights.py` how checkpoints store
them. `kv.py` is layers and formats of the KV cache, and what other layers keep of a request,
`rope.py` rotary positions, `engine_folder.py` what an engine folder says, `fields.py` checked
reading of JSON.
"""
