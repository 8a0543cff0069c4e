"""Known fields that are not honoured and would change the answer: they are refused by name.

Only the tables here list such fields, each with the values that have no effect. Those values are
accepted, since some clients always send them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from kvik.core.sampling_params import PARAMETERS, TRUNCATIONS
from kvik.errors import ParamError
from kvik.server.structured import READERS

# field -> (values that have no effect, besides null; why others are refused)
Table = Mapping[str, tuple[Sequence[object], str]]

NOTHING: Table = {}

NOTHING_KEPT = "the server keeps no conversations: send all of it"
RESPONSES_KEPT = "the server keeps responses, but no conversations: give previous_response_id"
STRUCTURED = "give response_format or structured_outputs"

# field -> error code that makes its clients send the request again without it
CODES: Mapping[str, str] = {"thread": "thread_unsupported_request"}

_OFF = (0, False)
_TRUNCATED = f"unlikely tokens are dropped by {', '.join(one.name for one in TRUNCATIONS)} only"
_TEMPERED = "the temperature of a request is constant: give temperature"
_PENALISED = (
    "repetition is penalised with repetition_penalty, presence_penalty, frequency_penalty and DRY"
)
_WHOLE = "penalties count all tokens of the prompt and the output"
_GUIDED = "guidance by a second prompt is not implemented"
_ADAPTERS = "give the name of an adapter (--adapters) as the model"
_FIXED_ORDER = "the order of the samplers is fixed"
_LIMITS = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens"),
    *("max_new_tokens", "num_predict", "n_predict"),
)


def limited_by(name: str) -> Table:
    """Return the fields with which other routes and engines limit the output, refused in favour of
    this one."""
    return dict.fromkeys(_LIMITS, ((), f"give {name}"))


# Fields of other engines (vLLM, SGLang, llama.cpp, TGI, Ollama, text-generation-webui) and their
# clients, for every route that samples. A parameter that has no effect unless another one enables
# it may have its default value.
SAMPLING: Table = {
    # what the output must look like
    "grammar_lazy": (_OFF, STRUCTURED),
    "grammar_triggers": (([],), STRUCTURED),
    "structural_tag": (("",), STRUCTURED),
    "format": (("",), STRUCTURED),
    "guided_whitespace_pattern": (("",), STRUCTURED),
    # adapters
    "lora": (("", [], {}), _ADAPTERS),
    "lora_path": (("",), _ADAPTERS),
    "lora_request": (({},), _ADAPTERS),
    "adapter_id": (("",), _ADAPTERS),
    # which tokens can be sampled, and with what probability
    "top_a": (_OFF, _TRUNCATED),
    "tfs": ((1, *_OFF), _TRUNCATED),
    "tfs_z": ((1, *_OFF), _TRUNCATED),
    "typical": ((1, *_OFF), "give typical_p"),
    "typ_p": ((1, *_OFF), "give typical_p"),
    "top_n_sigma": ((-1, *_OFF), _TRUNCATED),
    "nsigma": ((-1, *_OFF), _TRUNCATED),
    "epsilon_cutoff": (_OFF, _TRUNCATED),
    "eta_cutoff": (_OFF, _TRUNCATED),
    "min_keep": ((1, *_OFF), _TRUNCATED),
    "xtc_probability": (_OFF, _TRUNCATED),
    "xtc_threshold": ((0.1, *_OFF), _TRUNCATED),
    "mirostat": (_OFF, _TRUNCATED),
    "mirostat_mode": (_OFF, _TRUNCATED),
    "mirostat_tau": ((5, *_OFF), _TRUNCATED),
    "mirostat_eta": ((0.1, *_OFF), _TRUNCATED),
    "penalty_alpha": (_OFF, "contrastive search is not supported"),
    "do_sample": ((True,), "give temperature: 0 for the most likely token"),
    "dynamic_temperature": (_OFF, _TEMPERED),
    "dynatemp_range": (_OFF, _TEMPERED),
    "dynatemp_exponent": ((1, *_OFF), _TEMPERED),
    "dynatemp_low": ((1, *_OFF), _TEMPERED),
    "dynatemp_high": ((1, *_OFF), _TEMPERED),
    "smoothing_factor": (_OFF, _TEMPERED),
    "smoothing_curve": ((1, *_OFF), _TEMPERED),
    "temperature_last": (_OFF, _FIXED_ORDER),
    "samplers": (([], ""), _FIXED_ORDER),
    "sampler_order": (([], ""), _FIXED_ORDER),
    "sampler_priority": (([], ""), _FIXED_ORDER),
    "logits_processors": (([],), "code is not taken from requests"),
    "custom_logit_processor": (("",), "code is not taken from requests"),
    "custom_params": (({},), "code is not taken from requests"),
    "watermark": (_OFF, "output is not watermarked"),
    # repetition
    "repeat_last_n": ((-1,), _WHOLE),
    "repetition_penalty_range": (_OFF, _WHOLE),
    "repetition_penalty_slope": ((1, *_OFF), _WHOLE),
    "encoder_repetition_penalty": ((1, *_OFF), _PENALISED),
    "no_repeat_ngram_size": (_OFF, _PENALISED),
    "penalize_nl": (_OFF, _PENALISED),
    "penalty_prompt": (("", []), _WHOLE),
    "dry_range": (_OFF, _PENALISED),
    # guidance
    "guidance_scale": ((1, *_OFF), _GUIDED),
    "cfg_scale": ((1, *_OFF), _GUIDED),
    "negative_prompt": (("",), _GUIDED),
    "use_beam_search": (_OFF, "give num_beams"),
    # where the output begins and ends
    "best_of": ((1, *_OFF), "give n"),
    **limited_by("max_tokens"),
    "thinking_token_budget": ((), "it is for /v1/chat/completions"),
    "min_new_tokens": (_OFF, "give min_tokens"),
    "min_length": (_OFF, "give min_tokens"),
    "stop_regex": (("", []), "give stop"),
    "stop_strings": (("", []), "give stop"),
    "stop_sequences": (([],), "give stop"),
    "no_stop_trim": (_OFF, "give include_stop_str_in_output"),
    "n_indent": (_OFF, "indentation does not end an answer"),
    "n_keep": (_OFF, "prompts are not truncated"),
    "n_discard": (_OFF, "prompts are not truncated"),
    "num_ctx": ((), "the context is the server's: --max-model-len"),
    "truncate": ((), "prompts are not truncated"),
    "truncate_prompt_tokens": ((), "prompts are not truncated"),
    "t_max_predict_ms": (_OFF, "give deadline_ms"),
    "token_healing": (_OFF, "the last token of a prompt is kept"),
    "kv_transfer_params": (({},), "the KV cache is not transferred"),
    **dict.fromkeys(
        ("options", "parameters", "sampling_params", "extra_body"),
        (({},), "give its fields beside the others of the request"),
    ),
    # what is returned
    "n_probs": (_OFF, "give logprobs"),
    "top_n_tokens": (_OFF, "give logprobs"),
    "logprob_token_ids": (([],), "log probabilities are those of the most likely tokens"),
    "post_sampling_probs": (_OFF, "log probabilities are those before sampling"),
    "return_full_text": (_OFF, "output is returned without its prompt"),
    "return_hidden_states": (_OFF, "hidden states are not returned"),
    "return_tokens": (_OFF, "token ids are not returned"),
    "return_token_ids": (_OFF, "token ids are not returned"),
    "return_tokens_as_token_ids": (_OFF, "tokens are returned as text"),
    "detokenize": ((True,), "tokens are returned as text"),
}


def missing(fields: Collection[str], structured: str = "structured_outputs") -> Table:
    """Return the sampling parameters of this server's other routes that this request does not have.

    Args:
        fields: fields of the request.
        structured: its field that constrains the text.
    """
    table: dict[str, tuple[Sequence[object], str]] = {}
    for param in PARAMETERS.values():
        if (
            param.name in fields or param.name == "speculation"
        ):  # speculation never changes the answer
            continue
        harmless = list(param.default) if isinstance(param.default, tuple) else param.default
        table[param.name] = ((harmless, False), "this route does not have it")
    for name in READERS.keys() - fields:
        table[name] = (("", [], {}, False, {"type": "text"}), f"give {structured}")
    return table


def refuse(values: Mapping[str, object], table: Table, param: str | None = None) -> None:
    """Raise `ParamError` if a field of the table has a value with an effect.

    Args:
        values: an object of the request: field -> value.
        param: the field of the request that holds it, if it is not the request itself.
    """
    for name, value in values.items():
        if name not in table or value is None:
            continue
        harmless, reason = table[name]
        if any(_equal(value, default) for default in harmless):
            continue
        if param is None:
            code = CODES.get(name, "")
            raise ParamError(name, f"is not supported: {reason}", code=code)
        raise ParamError(param, f"have {name}, which is not supported: {reason}")


def _equal(value: object, other: object) -> bool:
    """Return whether two values are equal as JSON, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)
