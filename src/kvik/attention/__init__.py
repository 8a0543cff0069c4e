"""Attention over the paged KV cache: one seam, several backends.

`base.py` is the seam: the layout of a step, what a layer attends with (`Attend`), and keys and
values in and out of the cache by torch's operations. `reference.py` is the meaning, `sdpa.py` uses
torch's kernels, `cpu.py` the native ones, `triton.py` those for GPUs, with `fresh_prompts.py` for
prompts that torch computes faster. `select.py` names them. `budget.py` says which tokens a layer
with a budget keeps.
"""
