"""A fresh process that starts an engine with options that it reads as JSON from standard input, and
writes the times of the parts as its last line."""

# The clock is read before anything else is imported.
import time

BEGAN = time.monotonic()

import json  # noqa: E402
import sys  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from importlib.abc import MetaPathFinder  # noqa: E402
from importlib.machinery import ModuleSpec, PathFinder  # noqa: E402
from types import ModuleType  # noqa: E402


class TorchImport(MetaPathFinder):
    """Records the end of the import of torch, which other code triggers.

    Attributes:
        time: of the end, by `time.monotonic`.
    """

    time = 0.0

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        spec = PathFinder.find_spec(name, path, target)
        assert spec is not None and spec.loader is not None
        run = spec.loader.exec_module

        def timed(module: ModuleType) -> None:
            run(module)
            self.time = time.monotonic()

        spec.loader.exec_module = timed  # type: ignore[method-assign]
        return spec


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
    torch_imported = TorchImport()
    sys.meta_path.insert(0, torch_imported)
    engine = start(resolved)
    marks.append(torch_imported.time)
    mark()
    run_jobs(engine, [BenchRequest(order["prompt"], 1)])
    mark()
    engine.loop.close()

    from kvik_bench.report.result import peak_bytes

    print(json.dumps({"marks": marks, "peak_bytes": peak_bytes()}))


if __name__ == "__main__":
    main()
