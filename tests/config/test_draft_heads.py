"""The config.json of draft heads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvik.config.draft_heads import (
    EAGLE,
    MEDUSA,
    HeadsSpec,
    heads_for,
    read_heads_spec,
    shipped_heads,
)
from kvik.errors import ConfigError, ModelError

SPECS = [
    HeadsSpec(MEDUSA, 64, 100, depth=3, layers=2),
    HeadsSpec(MEDUSA, 64, 100, depth=2, own_logits=True, accuracies=((0.5, 0.25), (0.125, 0.0))),
    HeadsSpec(EAGLE, 64, 100, depth=4, inner_size=96),
]


def write(folder: Path, values: object) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("spec", SPECS)
def test_a_written_spec_is_read_back(spec, tmp_path):
    assert read_heads_spec(write(tmp_path, spec.as_config("model")), spec.kind) == spec


def test_an_early_checkpoint_of_medusa(tmp_path):
    values = {"medusa_num_heads": 5, "medusa_num_layers": 1, "base_model_name_or_path": "a/b"}
    found = heads_for(write(tmp_path, values), MEDUSA, 64, 100)  # for any model
    assert found == HeadsSpec(MEDUSA, 64, 100, depth=5, own_logits=True)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "eagle"}, "model_type"),
        ({"medusa_num_heads": 0}, "medusa_num_heads"),
        ({"medusa_num_layers": 99}, "medusa_num_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"own_logits": 1}, "own_logits"),
        ({"accuracies": [[0.5]]}, "accuracies"),
        ({"accuracies": [[0.5], [1.5], [0.1]]}, "accuracies"),
        ({"accuracies": [[0.5], [], [0.1]]}, "accuracies"),
        ({"accuracies": {"a": 1}}, "accuracies"),
    ],
)
def test_invalid_fields_are_named(change, field, tmp_path):
    folder = write(tmp_path, {**SPECS[0].as_config("model"), **change})
    with pytest.raises(ModelError, match=field):
        read_heads_spec(folder, MEDUSA)


def test_eagle_configs_need_type_and_size(tmp_path):
    for field in ("model_type", "hidden_size"):
        values = {k: v for k, v in SPECS[2].as_config("model").items() if k != field}
        with pytest.raises(ModelError, match=field):
            read_heads_spec(write(tmp_path, values), EAGLE)


def test_heads_of_another_model(tmp_path):
    folder = write(tmp_path, SPECS[0].as_config("model"))
    assert heads_for(folder, MEDUSA, 64, 100) == SPECS[0]
    with pytest.raises(ModelError, match="hidden states of 64 and 100 tokens, the model has 32"):
        heads_for(folder, MEDUSA, 32, 100)
    with pytest.raises(ModelError, match=r"^spec_model: holds no eagle heads: config.json model_t"):
        heads_for(folder, EAGLE, 64, 100)
    with pytest.raises(ModelError, match=r"^spec_model: holds no medusa heads: config.json: is mi"):
        heads_for(tmp_path / "elsewhere", MEDUSA, 64, 100)


def test_heads_that_come_with_a_model(tmp_path):
    model, heads = tmp_path / "tiny", tmp_path / "tiny-medusa"
    with pytest.raises(ConfigError, match="must name the medusa heads"):
        shipped_heads(MEDUSA, model)
    heads.mkdir()
    write(heads, {})
    assert shipped_heads(MEDUSA, model) == heads
