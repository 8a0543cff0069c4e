"""Facts of models that both trunks read, without torch and without dependencies on either.

`model.py` has a model's sizes, `architecture.py` what an architecture implies beyond them,
`network.py` the interfaces of networks and layers, `declare.py` the vocabulary in which networks
declare layers, which `nn/builder.py` builds, and `declared.py` the list of these. `weight_kind.py`
describes weights in memory, `weights.py` chooses the kind of each layer, and `stored_weights.py`
describes weights in checkpoints. `kv.py` has the layers and formats of the KV cache and the states
of other layers, `visible_keys.py` which keys a query sees and so which blocks a request needs,
`rope.py` rotary positions, `adapters.py` adapters that requests choose, `engine_folder.py` the
manifest of engine folders, `fields.py` validated reading of JSON, `patterns.py` regular expressions
in bounded time.
"""
