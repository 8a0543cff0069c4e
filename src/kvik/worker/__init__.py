"""Computes plans with one model and its cache on one device.

A step: `model_runner.py` applies the plan's diff to `request_table.py`, gathers `input_batch.py`,
runs the forward, and hands the step to its participants: `prompt_outputs.py`, `output_tokens.py`,
`speculator.py`.

Memory of inputs and results: `step_inputs.py` (fixed memory, copies from the device). Running the
forward: `graphs.py` eagerly, `replays.py` from a recording, `captures.py` (what is captured when,
and its memory), `warm_up.py`.

Sampling: `sampling_table.py` (parameters and state by slot), `logits_rules.py` and `dry.py` (rules
on the host), `sampling_batch.py` (parameters for one step), `sampler.py` (logits to tokens).

Drafts: `drafters/` make them, `speculator.py` decides how many each request gets, using
`adaptive.py` and `draft_estimates.py`; `draft_tree.py` defines how they branch; `rejection.py`
decides which are accepted.

`transformers_model.py` is another forward, for models that kvik does not implement.

`worker.py` is the executor of this process; `platforms.py` chooses device and kernels, `team.py`
the number of threads; `loading.py` loads the model with its cache, `engine_cache.py` keeps weights
for the next start, `ahead.py` begins to load before torch is imported. `page_mover.py` moves blocks
between the cache and its tiers, `staged_mover.py` by copies that end later, of several processes or
of a GPU (`page_copies.py`); `disk_tier.py` keeps pages in files, `peer_tier.py` exchanges pages
with other engines.
"""
