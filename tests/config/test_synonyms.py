"""Other engines' names of options of kvik."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from kvik import LLM
from kvik.cli.flags import given_engine_options
from kvik.cli.generate import build_parser
from kvik.config.config import EngineConfig
from kvik.config.env import environment_options, read_option_file
from kvik.config.synonyms import SYNONYMS, translated
from kvik.errors import ConfigError


def test_each_name_leads_to_an_option_or_to_a_reason() -> None:
    options = {one.name for one in fields(EngineConfig)}
    for name, synonym in SYNONYMS.items():
        assert name not in options
        assert synonym.option in options or (not synonym.option and synonym.why and synonym.kind)


@pytest.mark.parametrize(
    ("given", "here"),
    [
        ({"gpu_memory_utilization": 0.5, "max_model_len": 9}, None),
        ({"speculative_model": "m", "num_speculative_tokens": 3}, None),
        ({"swap_space": 4, "trust_remote_code": True}, {}),
        ({"enforce_eager": True}, {"graph_memory": 0}),
        ({"enforce_eager": False}, {}),
        ({"quantization": None, "dtype": "torch.float16"}, None),
        ({"load_in_4bit": True}, {"quantization": "int4"}),
        ({"disable_radix_cache": True}, {"enable_prefix_caching": False}),
        ({"speculative_model": "[ngram]"}, {"spec_model": None, "spec_method": "ngram"}),
    ],
)
def test_a_name_becomes_the_option(given: dict[str, Any], here: dict[str, Any] | None) -> None:
    expected = {
        "gpu_memory_utilization": {"memory_utilization": 0.5, "max_model_len": 9},
        "speculative_model": {"spec_model": "m", "spec_tokens": 3, "spec_method": "draft_model"},
        "quantization": {"quantization": "none", "dtype": "float16"},
    }
    assert translated(given) == (expected[next(iter(given))] if here is None else here)


def test_options_without_effect_are_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    translated({"trust_remote_code": True, "swap_space": 4, "max_model_len": 8})
    (record,) = caplog.records
    assert "trust_remote_code" in record.message and "swap_space" in record.message


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size"),
        ({"cpu_offload_gb": 10}, "cpu_offload_gb"),
        ({"gpu_memory_utilization": 0.5, "memory_utilization": 0.6}, "gpu_memory_utilization"),
        ({"gpu_mem_utilization": 0.5}, "gpu_mem_utilization"),
        ({"quantization": "awq"}, "quantization"),
    ],
)
def test_what_kvik_does_not_have_is_one_error(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field}: "):
        LLM("", device="cpu", **given)


def test_flags_variables_and_files_know_the_names(tmp_path) -> None:
    words = ["--gpu-memory-utilization", "0.5", "--enforce-eager", "--swap-space", "4", "prompt"]
    here = {"memory_utilization": 0.5, "graph_memory": 0}
    assert given_engine_options(build_parser().parse_args(words)) == here
    environ = {"KVIK_GPU_MEMORY_UTILIZATION": "0.5", "KVIK_ENFORCE_EAGER": "true"}
    assert environment_options(environ) == here
    (tmp_path / "kvik.toml").write_text("gpu-memory-utilization = 0.5\nenforce_eager = true\n")
    assert read_option_file(str(tmp_path / "kvik.toml"))[EngineConfig] == here
    with pytest.raises(ConfigError, match="KVIK_SWAP_SPACE: must be a number"):
        environment_options({"KVIK_SWAP_SPACE": "much"})
