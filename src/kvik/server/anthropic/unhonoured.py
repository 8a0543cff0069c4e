"""Fields that are known, are not honoured, and would change the answer: refused by name."""

from __future__ import annotations

from kvik.server.unhonoured import Table

_TOOLS = "tools are not supported yet"
_OUTPUT = "constrained output is not supported yet"

# field -> (values that ask for nothing, beside null; why others are refused)
COUNT: Table = {
    "tools": (([],), _TOOLS),
    "tool_choice": (({"type": "auto"}, {"type": "none"}), _TOOLS),
    "mcp_servers": (([],), _TOOLS),
    "thinking": (({"type": "disabled"},), "thinking is not supported yet"),
    "output_config": (({},), _OUTPUT),
    "output_format": ((), _OUTPUT),
    "context_management": (({},), "the context is not edited"),
}
MESSAGES: Table = {
    **COUNT,
    "container": ((), "there are no containers"),
}
