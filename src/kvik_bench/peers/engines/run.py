"""`python run.py ADAPTER.py JOB.json ANSWER.json`: runs an adapter in the engine's own Python.

Adapters are loaded as modules of a package made of this folder, so that `from .protocol import ...`
works where kvik is not installed. The folder itself must not be on the import path: its files are
named after the engines that they import.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import signal
import sys
import traceback
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGE = "kvik_engines"


def load(name: str, path: Path, folder: Path | None = None) -> ModuleType:
    """Load the module at `path`; as a package if its `folder` is given."""
    places = None if folder is None else [str(folder)]
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def read_job(protocol: ModuleType, text: str) -> Any:
    fields = json.loads(text)
    workloads = [protocol.Workload(**work) for work in fields.pop("workloads")]
    return protocol.Job(workloads=workloads, **fields)


def main() -> None:
    adapter, job_file, answer_file = map(Path, sys.argv[1:])
    folder = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != folder]
    load(PACKAGE, folder / "__init__.py", folder)
    protocol = importlib.import_module(f"{PACKAGE}.protocol")
    job = read_job(protocol, job_file.read_text("utf-8"))
    # At the time limit. A program that it runs is waited for, so that its memory is known.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("it took too long"))
    try:
        answer = load(f"{PACKAGE}.{adapter.stem}", adapter).run(job)
    except Exception as error:
        traceback.print_exc()
        is_failure = isinstance(error, protocol.EngineFailure)
        reason = str(error) if is_failure else f"{type(error).__name__}: {error}"
        answer = protocol.Answer(failed=" ".join(reason.split()))
    answer_file.write_text(json.dumps(asdict(answer)), "utf-8")
    if answer.failed:
        sys.exit(1)


if __name__ == "__main__":
    main()
