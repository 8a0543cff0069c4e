"""Predicts a model's cost on a machine: memory, rooflines, money, advice. Without torch.

`shape.py` describes the properties of a model that its cost depends on. `families.py` reads them
from the model's declaration or, if kvik does not run the model, from that of a similar one.
`devices.py` and `calibration.py` describe machines, `memory.py` what fits, `roofline.py` how long a
step takes, `parallel.py` how several processes or devices share a model, `cost.py` money,
`speculation.py` the gain from drafts, `serving.py` a load on a server and its objectives.
`formats.py` lists storage formats, `variants.py` describes a model in other formats, `search.py`
finds thresholds. `plan.py` implements `kvik plan`, `advice/` implements `kvik advise`;
`efficiency.py` and `machine_metrics.py` compare an engine's performance with the limits of its
machine.
"""
