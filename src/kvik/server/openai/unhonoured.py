"""Fields of OpenAI's API that are known and not honoured."""

from __future__ import annotations

from kvik.server.unhonoured import SAMPLING, TOOLS, Table

_MEDIA = "only text is supported"
_REASONING = "reasoning is not controlled yet"

CHAT: Table = {
    **SAMPLING,
    "chat_template": ((), "the template is the model's own"),
    "tools": (([],), TOOLS),
    "tool_choice": (("none", "auto"), TOOLS),
    "functions": (([],), TOOLS),
    "function_call": (("none", "auto"), TOOLS),
    "modalities": ((["text"], []), _MEDIA),
    "audio": ((), _MEDIA),
    "reasoning_effort": (("none",), _REASONING),
    "thinking_token_budget": ((), _REASONING),
    "enable_thinking": ((), "put it into chat_template_kwargs"),
    "verbosity": (("medium",), "is not supported"),
    "web_search_options": ((), "there is no search"),
    "documents": (([],), "put them into a message"),
    "echo": ((False,), "is for /v1/completions"),
    "mm_processor_kwargs": (({},), _MEDIA),
}
COMPLETION: Table = {
    **SAMPLING,
    "max_completion_tokens": ((), "give max_tokens"),
    "top_logprobs": ((), "give logprobs"),
    "suffix": (("",), "insertion is not supported"),
    "prompt_embeds": ((), "prompts are text or token ids"),
}
MESSAGE: Table = {
    "tool_calls": (([],), TOOLS),
    "tool_call_id": ((), TOOLS),
    "function_call": ((), TOOLS),
    "audio": ((), _MEDIA),
}
EMBEDDING: Table = {
    # -1: at the end of the context; what is longer is refused for that
    "truncate_prompt_tokens": ((-1,), "inputs are not truncated"),
    "messages": ((), "give input"),
}
TOKENIZE: Table = {
    "chat_template": ((), "the template is the model's own"),
    "tools": (([],), TOOLS),
}
