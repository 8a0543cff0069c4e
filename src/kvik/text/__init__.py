"""From text to token ids and back.

`tokenizer.py`, `detokenizer.py` (incremental, with stop strings). `limited_process.py`: runs work
on untrusted input in a child with limits. `chat_template.py` checks messages and has them rendered
in such a child (`template_process.py`); `grammar_check.py` has grammars built in one. `grammar.py`:
translates a constraint, or the enforceable part of a schema, to a grammar; `schema_numbers.py`: the
numbers of a schema; `matcher.py`: which tokens may come next. `dialects.py`: formats of tool calls,
from which a grammar (`tool_grammar.py`) and a parser (`tool_calls.py`) are derived; `thoughts.py`:
reasoning before an answer; `answer_format.py`: both together, detected from a model's template;
`harmony.py`: gpt-oss's channels.
"""
