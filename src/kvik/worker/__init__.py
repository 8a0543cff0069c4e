"""Computes plans with one model and its cache on one device.

The way of a step: `model_runner.py` applies the plan's diff to `request_table.py`, gathers
`input_batch.py`, runs the forward, and hands the step to its participants (`participant.py`):
`prompt_outputs.py`, `output_tokens.py`, `speculator.py`.

Where inputs and results lie: `step_inputs.py` (fixed memory, copies from the device). How the
forward runs: `graphs.py` eagerly or replayed, `cpu_tape.py`, `cuda_graphs.py`, `captures.py` (what
is captured when, and its memory), `warm_up.py` and `triton_warm_ups.py`.

Sampling: `sampling_table.py` (parameters and state by slot), `logits_rules.py` and `dry.py` (rules
on the host), `sampling_batch.py` (what one step needs), `sampler.py` (logits to tokens).

Drafts: `drafters/` make them, `speculator.py` says how many each request gets, by `adaptive.py`,
`acceptance.py` and `step_costs.py`; `draft_tree.py` how they may branch; `rejection.py` which are
right.

`transformers_model.py` is another forward, for models that kvik does not know.

`worker.py` is the executor of this process; `platforms.py` what it computes with and on which
device, `team.py` on how many threads, `loading.py` the model with its cache, `engine_cache.py`
the weights it keeps for the next start, `ahead.py` what is begun before torch is imported.
`page_mover.py` moves blocks between the cache and its tiers, `group_pages.py` the same where
several processes have parts of them, `disk_tier.py` keeps them in files, `peer_tier.py` gives them
to other engines and fetches theirs.
"""
