"""Options of the engine and the server, facts of the machine, and the decisions from both.

`config.py` and `server_config.py` declare the options, `env.py` reads them from variables and a
TOML file. `hardware.py` says what the machine has, `model_source.py` where a name leads. `units.py`
names sizes. `resolve.py` turns wishes and facts into decisions with reasons: `compute.py` what
computes and in what, `memory.py` bytes by part, `fit.py` how much fits and what to say when it
cannot, `graph_sizes.py` what is captured, `speculative.py` and `draft_heads.py` what guesses ahead,
`kv_budget.py` how many tokens layers keep.
"""
