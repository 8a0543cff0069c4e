"""An engine process without a model, `python engine_child.py MODE FD FD`, to test its supervision.

Tokens of a prompt control what it does in the step that reads them. In the mode "hangs:N" it hangs
once N requests have a token.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from pathlib import Path

CRASH, HANG = 60, 61  # tokens of a prompt

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

    from helpers.served_engine import FakeExecutor

    from kvik.core.plan import SchedulerOutput
    from kvik.engine.core import EngineCore
    from kvik.engine.host import EngineHost
    from kvik.engine.loop import EngineLoop
    from kvik.engine.wire import HostSocket, Unusable, frame, to_start
    from kvik.engine_process import beat

    class Misbehaving(FakeExecutor):
        def submit(self, plan: SchedulerOutput) -> object:
            prompts = {token for new in plan.new_requests for token in new.token_ids}
            if CRASH in prompts:
                print("here it goes", file=sys.stderr, flush=True)
                os._exit(3)
            all_have_begun = not plan.new_requests and len(plan.slots) == running
            if HANG in prompts or all_have_begun:
                time.sleep(1000)
            return super().submit(plan)

    mode, fd, beats = sys.argv[1:]
    running = int(mode.removeprefix("hangs:")) if mode.startswith("hangs:") else None
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    if mode == "broken":
        raise RuntimeError("this engine cannot even start")
    line = HostSocket(socket.socket(fileno=int(fd)))
    while not (bodies := line.receive(None)):
        pass
    start = to_start.decode(bodies[0])
    marker = Path(mode.removeprefix("once:"))
    if mode == "unusable" or (mode.startswith("once:") and marker.exists()):
        line.send(frame(Unusable("model", "has no weights")))
        line.close()
        sys.exit(1)
    if mode.startswith("once:"):
        marker.touch()
    if mode == "deaf":
        time.sleep(1000)
    beating = beat(int(beats)) if mode == "beats" else None
    loop = EngineLoop(EngineCore(start.config), Misbehaving(seconds=0.002), time.monotonic)
    EngineHost(loop, line, reports=start.reports).run()


def ranks_of(engine: int) -> list[int]:
    """Return the ids of an engine's rank processes."""
    return children_of(engine, "kvik.rank_process")


def children_of(parent: int, module: str) -> list[int]:
    """Return the ids of the children that run a module, in the order of their start."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/cmdline", "rb") as file:
                    command = file.read()
                with open(f"/proc/{name}/stat") as file:
                    its_parent = int(file.read().rpartition(")")[2].split()[1])
            except (OSError, ValueError):
                continue
            if module.encode() in command and its_parent == parent:
                found.append(int(name))
    return sorted(found)
