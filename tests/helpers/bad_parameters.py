"""Invalid values of sampling parameters, in Python and JSON, which the parameter's declaration
refuses on every path."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BAD: Mapping[str, list[Any]] = {
    "n": [0, -1, 129, 10**9, 1.5, True, "1"],
    "num_beams": [0, 65, 1.5, True, "2"],
    "length_penalty": [-10.1, 11, "x"],
    "early_stopping": [1, "never"],
    "temperature": [-0.1, 1e-9, 9e-4, 100.5, "hot", False],
    "top_k": [-2, 1.5, 2**31, True],
    "top_p": [0, -0.5, 1.01, "x"],
    "min_p": [-0.01, 1.01],
    "typical_p": [0, 1.5],
    "presence_penalty": [-2.1, 2.1],
    "frequency_penalty": [-2.1, 2.1],
    "repetition_penalty": [0, -1, 9e-4, 10.1],
    "dry_multiplier": [-0.1, 100.5, "x"],
    "dry_base": [0.9, 101],
    "dry_allowed_length": [0, 1.5],
    "dry_penalty_last_n": [-2, 1.5],
    "dry_sequence_breakers": [[[]], [[-1]], [1], [""], 7],
    "logit_bias": [[1], "x", {"-1": 0.0}, {"dog": 1}, {"1.5": 1}, {"1": 101}, {"1": None}],
    "allowed_token_ids": [[], [-1], [1.5], "12", [0] * 4097],
    "bad_words": [[[]], [[-1]], [1], [""], [["a"]], 7, ["a"] * 4097],
    "min_tokens": [-1, 0.5],
    "max_tokens": [0, -1, 1.5, True, "1", 2**31],
    "stop": ["", [""], ["a", ""], [1], 3, ["x"] * 17, ["x" * 1025], "é" * 513],
    "stop_token_ids": [[-1], [1.5], ["a"], 5, [0] * 4097],
    "ignore_eos": [1, "yes"],
    "seed": [1.5, "1", True],
    "logprobs": [-1, 101],
    "prompt_logprobs": [-1, 101, "1"],
    "prompt_logprobs_start": [-1, 1, "1"],
    "skip_special_tokens": [0, "no"],
    "include_stop_str_in_output": [1],
    "structured": [5, "a", [1], {"rgex": "a"}, {"regex": ""}, {"regex": "a", "json": {}}],
    "speculation": [0, "off"],
    "adapter": [3, ["a"], "a\0b"],
}
