"""From text to token ids and back.

`tokenizer.py`, `detokenizer.py` (incremental, with stop strings), `chat_template.py`, which checks
messages and asks `template_process.py`, the process with limits that renders them.
"""
