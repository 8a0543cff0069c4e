"""Takes the pictures of the playground in docs/images: python tools/screenshots.py

Needs Chromium, and starts a server of the bundled model.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # for what the tests drive a browser with

from helpers import chromium  # noqa: E402
from helpers.server_process import ServerProcess, server_process  # noqa: E402

IMAGES = ROOT / "docs" / "images"
QUESTION = "Tell me a story about a fox who lost her way"


def company(server: ServerProcess) -> list[threading.Thread]:
    """Others who use it meanwhile."""
    threads = []
    for i in range(14):
        body = {
            "prompt": f"Once upon a time there was {'a very old ' * (i * 3)}tree. " * 2,
            "max_tokens": 700,
            "ignore_eos": True,
            "n": 1 + i % 2,
        }
        threads.append(threading.Thread(target=server.post, args=("/v1/completions", body)))
        threads[-1].start()
        time.sleep(0.12)
    return threads


def main() -> None:
    program = chromium.find()
    if program is None:
        sys.exit("there is no Chromium")
    IMAGES.mkdir(exist_ok=True)
    flags = ("--max-num-seqs", "12", "--max-model-len", "1024", "--kv-cache-memory", "24m")
    with server_process(*flags) as server, chromium.Browser(program, 1360, 900) as browser:
        browser.go(server.url + "/")
        browser.wait("document.querySelector('#state').innerText === 'ready'")
        threads = company(server)
        browser.type("#say", QUESTION)
        browser.press("Enter", 13, "\r")
        browser.wait("document.querySelector('#messages > :last-child').innerText.length > 300")
        for scheme in ("light", "dark"):
            browser.scheme(scheme)
            browser.evaluate("new Promise(done => setTimeout(done, 700))")
            name = "playground.png" if scheme == "light" else "playground-dark.png"
            browser.screenshot(IMAGES / name)
        for thread in threads:
            thread.join()


if __name__ == "__main__":
    main()
