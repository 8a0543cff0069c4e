"""The engine around the core: one step loop, who computes its plans, and who reads its results.

`core.py` is the engine without I/O, `loop.py` the loop with its executor and client, `thread.py`
the loop in a thread that serves calls of any thread, `output.py` what a request puts out,
`stats.py` and `live.py` what is going on. With the engine behind a socket, `host.py` stands there
and `remote.py` here, `wire.py` is the socket between them, and `sources.py` starts the engine, in a
process or in a thread; `replicas.py` makes one client of several. `memory_watch.py` says when the
system is short of memory. `recorder.py` writes what happens into a file, `replay.py` runs it again
(`docs/flight-recorder.md`).
"""
