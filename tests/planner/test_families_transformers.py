"""Public models compared with the parameters of transformers, on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.public_configs import NAMES, config
from transformers import AutoConfig, AutoModelForCausalLM

from kvik.planner.families import shape_from_config

pytestmark = pytest.mark.full  # imports transformers, and makes a module for each config


def made_by_transformers(values: dict[str, Any]) -> int:
    """Return the parameters, and stored buffers, of the module made by transformers."""
    values = dict(values.get("text_config", values))
    model_type = values.pop("model_type")
    for key in ("architectures", "quantization_config"):
        values.pop(key, None)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    stored = set(model.state_dict())
    tensors = [*model.parameters(), *(b for name, b in model.named_buffers() if name in stored)]
    return sum(tensor.numel() for tensor in tensors)


@pytest.mark.filterwarnings("ignore")  # of transformers, about irrelevant defaults
@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_those_transformers_makes(name: str) -> None:
    assert shape_from_config(config(name), name).parameters == made_by_transformers(config(name))
