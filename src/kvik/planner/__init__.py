"""What a model should cost on a machine: memory, rooflines, money, advice. Without torch.

`shape.py` is a model as far as its cost depends on it, read by `families.py`: from its declaration,
or by the table of `layers.py` where kvik does not run it. `devices.py` and `calibration.py` know
machines, `memory.py` what fits, `roofline.py` how long a step takes, `parallel.py` how several
processes or devices share a model, `cost.py` money, `speculation.py` what drafts gain, `serving.py`
a load on a server and its objectives. `formats.py` is what numbers are stored in, `variants.py` the
same model in others, `search.py` finds borders. `plan.py` answers `kvik plan`, `advice/` answers
`kvik advise`; `efficiency.py` and `machine_metrics.py` say what an engine reaches of its machine.
"""
