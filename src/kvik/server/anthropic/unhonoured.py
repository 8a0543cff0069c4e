"""Fields that are known, are not honoured, and would change the answer: refused by name."""

from __future__ import annotations

from kvik.server.anthropic.message_request import MessageRequest
from kvik.server.unhonoured import SAMPLING, STRUCTURED, TOOLS, Table, missing

_ELSEWHERE = "this route does not take it"

COUNT: Table = {
    "tools": (([],), TOOLS),
    "tool_choice": (({"type": "auto"}, {"type": "none"}), TOOLS),
    "mcp_servers": (([],), TOOLS),
    "thinking": (({"type": "disabled"},), "thinking is not supported yet"),
    "output_config": (({},), STRUCTURED),
    "output_format": ((), STRUCTURED),
    "context_management": (({},), "the context is not edited"),
}
MESSAGES: Table = {
    **SAMPLING,
    **missing(MessageRequest.__struct_fields__),
    **COUNT,
    "chat_template": ((), "the template is the model's own"),
    "chat_template_kwargs": (({},), _ELSEWHERE),
    "container": ((), "there are no containers"),
    "stop": (([], ""), "give stop_sequences"),
    "repeat_penalty": ((1,), _ELSEWHERE),
    "n_predict": ((), "give max_tokens"),
    "max_completion_tokens": ((), "give max_tokens"),
}
