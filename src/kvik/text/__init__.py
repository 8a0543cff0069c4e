"""From text to token ids and back.

`tokenizer.py`, `detokenizer.py` (incremental, with stop strings). `limited_process.py`: work on
what callers send, in a child with limits; `chat_template.py` checks messages and asks one
(`template_process.py`) to render them, `grammar_check.py` to build grammars. `grammar.py`: from a
constraint, of a schema the part that can be enforced, to a grammar; `matcher.py`:
which tokens may come next. `dialects.py`: how models write tool calls, of which come a grammar
(`tool_grammar.py`) and a parser (`tool_calls.py`); `thoughts.py`: what comes before an answer;
`answer_format.py`: both together, found by a model's template; `harmony.py`: gpt-oss's channels.
"""
