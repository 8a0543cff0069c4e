"""Fields of OpenAI's API that are known and not honoured."""

from __future__ import annotations

from kvik.server.unhonoured import Table

_STRUCTURED = "constrained output is not supported yet"
_TOOLS = "tools are not supported yet"
_MEDIA = "only text is supported"
_BEAMS = "beam search is not supported"

GENERATING: Table = {
    "logits_processors": (([],), "code is not taken from requests"),
    "response_format": (({"type": "text"},), _STRUCTURED),
    "structured_outputs": (({},), _STRUCTURED),
    "guided_json": ((), _STRUCTURED),
    "guided_regex": ((), _STRUCTURED),
    "guided_choice": ((), _STRUCTURED),
    "guided_grammar": ((), _STRUCTURED),
    "use_beam_search": ((False,), _BEAMS),
    "beam_width": ((1,), _BEAMS),
    "length_penalty": ((1,), _BEAMS),
    "truncate_prompt_tokens": ((), "prompts are not truncated"),
    "return_token_ids": ((False,), "token ids are not returned"),
    "return_tokens_as_token_ids": ((False,), "tokens are returned as text"),
    "kv_transfer_params": (({},), "the KV cache is not transferred"),
}
CHAT: Table = {
    **GENERATING,
    "chat_template": ((), "the template is the model's own"),
    "tools": (([],), _TOOLS),
    "tool_choice": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "function_call": (("none", "auto"), _TOOLS),
    "modalities": ((["text"], []), _MEDIA),
    "audio": ((), _MEDIA),
    "reasoning_effort": (("none",), "reasoning is not controlled yet"),
    "thinking_token_budget": ((), "reasoning is not controlled yet"),
    "verbosity": (("medium",), "is not supported"),
    "web_search_options": ((), "there is no search"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "is for /v1/completions"),
    "mm_processor_kwargs": (({},), _MEDIA),
}
COMPLETION: Table = {
    **GENERATING,
    "suffix": (("",), "insertion is not supported"),
    "prompt_embeds": ((), "prompts are text or token ids"),
}
MESSAGE: Table = {
    "tool_calls": (([],), _TOOLS),
    "tool_call_id": ((), _TOOLS),
    "function_call": ((), _TOOLS),
    "audio": ((), _MEDIA),
}
EMBEDDING: Table = {
    # -1: at the end of the context; what is longer is refused for that
    "truncate_prompt_tokens": ((-1,), "inputs are not truncated"),
    "messages": ((), "give input"),
}
TOKENIZE: Table = {
    "chat_template": ((), "the template is the model's own"),
    "tools": (([],), _TOOLS),
}
