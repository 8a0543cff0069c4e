"""The production server: OpenAI- and Anthropic-compatible, over one engine that it is handed.

The edge: `http_protocol.py` is one connection, `app.py` one request in and out, `access.py` who may
send it, `route.py` routes and bodies, `errors.py` what is wrong with it. From request to text:
`texts.py` tokenizer and chat template, `admission.py` the queue limits, `generation.py` the way to
the engine and back, `responses.py` JSON and event streams. `server.py` puts the parts together,
`run.py` serves until a signal; `metrics.py` and `tracing.py` observe.

An endpoint is one file with its request, response, handler and routes: `native.py`, `anthropic.py`,
`llama_server.py`, `health.py`, `admin.py`, `engine_view.py` and all of `openai/`. `pages.py` serves
the playground of `ui/` and the documentation; `unhonoured.py` refuses what kvik does not have.
"""
