"""The pure core of the engine: standard library only, no clock, no I/O, no torch.

`config.py` holds its configuration, `types.py` requests, `sampling_params.py` their sampling
parameters, `plan.py` a step's plan and result. `scheduler.py` plans steps and processes their
results. It uses `queue.py` (waiting requests, deadlines), `policy.py` (order, chunks, victims),
`fair_share.py` (service, slots and blocks between tenants) and `kv_manager.py` (block tables),
which uses `block_pool.py` (blocks and the prefix cache), `pins.py` (pinned prefixes) and
`checkpoints.py` (copies of states). `moves.py` decides which blocks are copied to tiers and loaded
again; `tier_index.py` records which tier has which. `step_clock.py` measures how long steps take,
`work.py` counts what they compute. `beams.py` continues the beams of a search, each by a request
for one token. `routing.py` chooses among several engines.
"""
