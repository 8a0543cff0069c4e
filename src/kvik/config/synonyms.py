"""Other engines' names for kvik's options: vLLM first, then transformers, SGLang, TensorRT-LLM and
llama.cpp.

One row for each name: the option of kvik, the values without a meaning in kvik, and what to use
instead if kvik lacks the feature. `LLM(...)`, flags, variables and option files read this table.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kvik.config.config import EngineConfig
from kvik.errors import ConfigError
from kvik.options import (
    ANY,
    NO_FACTS,
    Flag,
    Integer,
    Number,
    Option,
    Synonym,
    Text,
    options_of,
    with_synonyms,
)

log = logging.getLogger(__name__)

COUNT, SHARE, SWITCH, WORD = Integer(0, 1 << 40), Number(0, 1e9), Flag(), Text()
_RANKS = "kvik divides a model by --tensor-parallel-size and --pipeline-parallel-size"
_OFFLOAD = "all weights lie in the memory of one device; --quantization makes them smaller"
_OWN_CODE = "kvik runs no code from a model's folder"
_RECOMPUTED = "what requests lose is kept if --kv-tiers says where, as memory:4GiB"

SYNONYMS: Mapping[str, Synonym] = {
    # vLLM
    "gpu_memory_utilization": Synonym("memory_utilization"),
    "kv_cache_memory_bytes": Synonym("kv_cache_memory"),
    "num_gpu_blocks_override": Synonym("num_blocks"),
    "scheduling_policy": Synonym("policy"),
    "speculative_model": Synonym("spec_model"),
    "num_speculative_tokens": Synonym("spec_tokens"),
    "enforce_eager": Synonym(
        "graph_memory",
        {True: 0},
        meaningless=(False,),
        why="steps are captured where that is faster",
        kind=SWITCH,
    ),
    "enable_expert_parallel": Synonym("expert_parallel"),
    "swap_space": Synonym(meaningless=ANY, why=_RECOMPUTED, kind=SHARE),
    "cpu_offload_gb": Synonym(meaningless=(0,), why=_OFFLOAD, kind=SHARE),
    "trust_remote_code": Synonym(meaningless=ANY, why=_OWN_CODE, kind=SWITCH),
    "tokenizer_mode": Synonym(
        meaningless=("auto", "fast"), why="tokenizer.json is the one that is read", kind=WORD
    ),
    "enable_chunked_prefill": Synonym(
        meaningless=(True, None),
        why="prompts are always computed in chunks; --max-num-batched-tokens is their size",
        kind=SWITCH,
    ),
    "use_v2_block_manager": Synonym(meaningless=ANY, why="there is one", kind=SWITCH),
    "disable_log_stats": Synonym(meaningless=ANY, why="none are logged", kind=SWITCH),
    "disable_log_requests": Synonym(meaningless=ANY, why="none are logged", kind=SWITCH),
    "disable_custom_all_reduce": Synonym(meaningless=ANY, why=_RANKS, kind=SWITCH),
    "lora_modules": Synonym("adapters"),
    "lora_paths": Synonym("adapters"),
    "enable_lora": Synonym(meaningless=ANY, why="--max-adapters does", kind=SWITCH),
    "max_lora_rank": Synonym("max_adapter_rank"),
    "max_loras": Synonym("max_adapters"),
    "max_cpu_loras": Synonym(meaningless=ANY, why="all adapters stay loaded", kind=COUNT),
    "task": Synonym(meaningless=ANY, why="every model generates and embeds", kind=WORD),
    "runner": Synonym(meaningless=ANY, why="every model generates and embeds", kind=WORD),
    "max_seq_len_to_capture": Synonym(meaningless=ANY, why="it is planned", kind=COUNT),
    "tokenizer": Synonym(
        meaningless=(None,), why="the tokenizer is read from the model's folder", kind=WORD
    ),
    "download_dir": Synonym(
        meaningless=(None,), why="set the variable HF_HOME in its place", kind=WORD
    ),
    "hf_token": Synonym(meaningless=(None,), why="set the variable HF_TOKEN", kind=WORD),
    "max_logprobs": Synonym(meaningless=ANY, why="the limit is fixed", kind=COUNT),
    # transformers
    "torch_dtype": Synonym("dtype"),
    "device_map": Synonym("device"),
    "load_in_8bit": Synonym(
        "quantization", {True: "int8"}, meaningless=(False,), why="it is off", kind=SWITCH
    ),
    "load_in_4bit": Synonym(
        "quantization", {True: "int4"}, meaningless=(False,), why="it is off", kind=SWITCH
    ),
    "low_cpu_mem_usage": Synonym(meaningless=ANY, why="weights are streamed", kind=SWITCH),
    # SGLang, TensorRT-LLM, llama.cpp
    "mem_fraction_static": Synonym("memory_utilization"),
    "context_length": Synonym("max_model_len"),
    "max_seq_len": Synonym("max_model_len"),
    "max_batch_size": Synonym("max_num_seqs"),
    "max_running_requests": Synonym("max_num_seqs"),
    "chunked_prefill_size": Synonym("max_num_batched_tokens"),
    "disable_radix_cache": Synonym(
        "enable_prefix_caching", {True: False, False: True}, kind=SWITCH
    ),
    "speculative_draft_model_path": Synonym("spec_model"),
    "tp_size": Synonym(meaningless=(1,), why=_RANKS, kind=COUNT),
    "n_ctx": Synonym("max_model_len"),
    "n_threads": Synonym("threads"),
    "n_gpu_layers": Synonym(meaningless=ANY, why="all layers are on --device", kind=WORD),
}


def synonym_options() -> tuple[Option, ...]:
    """Return the names as options that can be parsed from text; each is None unless given."""
    kinds = {option.name: option.kind for option in options_of(EngineConfig)}
    return tuple(
        Option(name, synonym.kind or kinds[synonym.option], None, "", optional=True, facts=NO_FACTS)
        for name, synonym in SYNONYMS.items()
    )


def translated(named: Mapping[str, Any]) -> dict[str, Any]:
    """Return options with other engines' names replaced by kvik's. Unknown names are kept.

    Names without a meaning in kvik are dropped, and one warning lists them.

    Raises:
        ConfigError: kvik lacks the feature of a name, or an option is given under two names.
    """
    options, ignored = with_synonyms(named, SYNONYMS, ConfigError)
    if named.get("speculative_model") and "spec_method" not in named:
        if named["speculative_model"] == "[ngram]":  # vLLM's word for drafts without a model
            options.update(spec_model=None, spec_method="ngram")
        else:
            options["spec_method"] = "draft_model"
    if "quantization" in options and options["quantization"] is None:
        options["quantization"] = "none"
    if "dtype" in options:
        options["dtype"] = str(options["dtype"]).removeprefix("torch.")
    if ignored:
        log.warning("without effect in kvik: %s", ", ".join(ignored))
    return options
