"""The pure heart of the engine: standard library only, no clock, no I/O, no torch.

`config.py` is what it takes in, `types.py` a request, `sampling_params.py` how it samples,
`plan.py` a step's plan and result. `scheduler.py` plans steps and takes in their results. It asks
`queue.py` (waiting requests, deadlines), `policy.py` (order, chunks, victims), `fair_share.py`
(service, slots and blocks between tenants) and `kv_manager.py` (block tables), which draws on
`block_pool.py` (blocks and the prefix cache), `pins.py` (pinned prefixes) and `checkpoints.py`
(copies of states). `moves.py` decides what is kept of the cache and loaded again, by what
`tier_index.py` knows. `step_clock.py` says how long steps take, `work.py` what they compute;
`invariants.py` audits all that. `routing.py` chooses among several engines.
"""
