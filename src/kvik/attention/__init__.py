"""Attention over the paged KV cache: one interface, several backends.

`base.py` is the interface: the layout of a step, the inputs of a layer (`Attend`), and reading and
writing the cache with torch's operations. `reference.py` defines the result, `sdpa.py` uses torch's
kernels, `cpu.py` the native ones, `triton.py` those for GPUs, with `fresh_prompts.py` for prompts
that torch computes faster. `group.py` divides heads among processes. `select.py` selects a backend
by name. `budget.py` decides which tokens a layer with a budget keeps.
"""
