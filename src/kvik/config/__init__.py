"""Options of the engine and the server, facts about the machine, and the decisions from both.

`config.py` and `server_config.py` declare the options, `env.py` reads them from variables and a
TOML file. `hardware.py` detects the machine's resources, `model_source.py` finds the files of a
model. `units.py` formats sizes. `resolve.py` turns options and facts into decisions with reasons:
`compute.py` chooses device, dtype, kernels and attention, `memory.py` counts bytes by part, with
`step_memory.py` and `adapter_memory.py`, `fit.py` finds sizes that fit and the error if none do,
`graph_sizes.py` the forwards to capture, `speculative.py` and `draft_heads.py` the drafters,
`kv_budget.py` the tokens that layers keep.
"""
