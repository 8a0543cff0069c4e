"""The engine around the core: the step loop, its executor, and the clients that use it.

`core.py` is the engine without I/O, `loop.py` the loop with its executor and client, `thread.py`
the loop in a thread that serves calls from any thread, `output.py` the output of requests,
`stats.py` and `live.py` statistics and the current state. If the engine is behind a socket,
`host.py` is the engine's side, `remote.py` the other side, `wire.py` the protocol between them, and
`sources.py` starts the engine in a process or thread; `client.py` is the server's client of one
engine or of several. `memory_watch.py` detects when the system is short of memory. `recorder.py`
records the engine's inputs in a file, `replay.py` runs them again (`docs/flight-recorder.md`).
"""
