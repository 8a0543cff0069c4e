"""The `kvik` command: `main.py` and one file per verb.

`flags.py` derives flags from declared options, `report.py` and `terminal.py` print,
`chat_backends.py` talks to an engine in this process or to a server, through the event streams of
`openai_stream.py`. `openai_batch.py` answers batch files of OpenAI's API for `generate`.
`plugins.py` lets packages built on kvik add verbs.
"""
