"""The `kvik` command: `main.py` and one file per verb.

`flags.py` makes flags of declared options, `report.py` and `terminal.py` print, `chat_backends.py`
talks to an engine here or to a server, by the event streams of `openai_stream.py`. `plugins.py`
lets packages that stand on kvik add verbs.
"""
