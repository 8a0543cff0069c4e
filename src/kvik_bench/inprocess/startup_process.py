"""A fresh process that starts an engine, and says on its last line of output how long the parts
took. Reads its orders, a `StartOrder` as JSON, from standard input."""

# The clock is read before anything else is imported.
import time

BEGAN = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402


def main() -> None:
    order = json.load(sys.stdin)
    marks = [order["started"], BEGAN]

    def mark() -> None:
        marks.append(time.monotonic())

    from kvik.config.config import EngineConfig
    from kvik.launch import resolve_config, start
    from kvik_bench.inprocess.inproc import BenchRequest, run_jobs

    mark()
    resolved = resolve_config(EngineConfig(**order["options"]))
    mark()
    import torch  # noqa: F401

    mark()
    engine = start(resolved)
    mark()
    run_jobs(engine, [BenchRequest(order["prompt"], 1)])
    mark()
    engine.client.close()

    from kvik_bench.report.result import peak_bytes

    print(json.dumps({"marks": marks, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
