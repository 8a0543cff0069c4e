"""Shared by tests of tool calls: a chat template that shows tools, and a function."""

from __future__ import annotations

from typing import Any

# The format of calls by Hermes and Qwen.
MESSAGES = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}
{%- for call in m.tool_calls or [] %}<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}"""
TEMPLATE = MESSAGES + "{% if add_generation_prompt %}assistant: {% endif %}"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 10},
        "days": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
