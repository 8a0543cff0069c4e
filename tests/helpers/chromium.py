"""A headless Chromium, driven over the DevTools protocol: https://chromedevtools.github.io."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import aiohttp

FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-port=0",
)
T = TypeVar("T")


def find() -> str | None:
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return next((path for name in names if (path := shutil.which(name))), None)


class Browser:
    """One window. `errors` are the errors of its console, `urls` the addresses it requested."""

    def __init__(self, program: str, width: int = 1280, height: int = 900) -> None:
        self._size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._runner = asyncio.Runner()
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={self._profile.name}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: str | None = None
        self._context: dict[str, str] | None = None  # cookies and storage of the window
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._reader: asyncio.Task[None] | None = None
        self.errors: list[str] = []
        self.urls: list[str] = []
        try:
            self._run(self._open())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the window, the process and its profile, as far as they were opened."""
        try:
            self._run(self._close())
        finally:
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process.stderr.close()
            self._runner.close()
            self._profile.cleanup()

    def renew(self) -> None:
        """Replace the window by a new one, without cookies and storage."""
        self._run(self._open_window())

    # -- user actions ----------------------------------------------------------------------------

    def go(self, url: str) -> None:
        self.command("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    def type(self, selector: str, text: str) -> None:
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.command("Input.insertText", text=text)

    def press(self, key: str, code: int = 0, text: str = "", modifiers: int = 0) -> None:
        event = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.command("Input.dispatchKeyEvent", type="keyDown", text=text, **event)
        self.command("Input.dispatchKeyEvent", type="keyUp", **event)

    def click(self, selector: str) -> None:
        """Click the middle of an element; an element that covers it receives the click."""
        x, y = self._middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.command(
                "Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1
            )

    def resize(self, width: int, height: int, scale: float = 1.0, *, phone: bool = False) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=phone,
        )

    def scheme(self, name: str) -> None:
        """Set the colour scheme, "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": name}
        self.command("Emulation.setEmulatedMedia", features=[feature])

    # -- inspection ------------------------------------------------------------------------------

    def evaluate(self, expression: str) -> Any:
        answer = self.command(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def text(self, selector: str) -> str:
        return self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")

    def wait(self, expression: str, seconds: float = 30.0) -> None:
        """Wait until the expression is true."""
        for _ in range(int(seconds / 0.05)):
            if self.evaluate(f"Boolean({expression})"):
                return
            self._run(asyncio.sleep(0.05))
        raise AssertionError(f"never true: {expression}\n{self.errors}")

    def screenshot(self, path: Path) -> None:
        answer = self.command("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(answer["data"]))

    def accessible(self) -> list[dict[str, Any]]:
        """Return the nodes of the accessibility tree."""
        return self.command("Accessibility.getFullAXTree")["nodes"]

    def command(self, method: str, **params: Any) -> dict[str, Any]:
        return self._run(self._send(method, params))

    # -- the protocol ----------------------------------------------------------------------------

    def _middle(self, selector: str) -> tuple[float, float]:
        script = (
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'}); const b = e.getBoundingClientRect(); "
            "return [b.x + b.width / 2, b.y + b.height / 2] })()"
        )
        x, y = self.evaluate(script)
        return x, y

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return self._runner.run(work)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        line = ""
        while not line.startswith("DevTools listening on "):
            line = await asyncio.wait_for(
                loop.run_in_executor(None, self._process.stderr.readline), 60
            )
            if not line:
                raise RuntimeError("Chromium did not start")
        self._client = aiohttp.ClientSession()
        self._socket = await self._client.ws_connect(line.split()[-1], max_msg_size=0)
        self._reader = loop.create_task(self._read(self._socket))
        await self._open_window()

    async def _open_window(self) -> None:
        old, self._session = self._context, None
        self._context = await self._send("Target.createBrowserContext", {})
        target = {"url": "about:blank", **self._context}
        page = (await self._send("Target.createTarget", target))["targetId"]
        if old is not None:
            await self._send("Target.disposeBrowserContext", old)
        attached = await self._send("Target.attachToTarget", {"targetId": page, "flatten": True})
        self._session = attached["sessionId"]
        self.errors.clear()
        self.urls.clear()
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self._send(f"{domain}.enable", {})
        await self._send("Emulation.setDeviceMetricsOverride", self._size)

    async def _close(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
        if self._socket is not None:
            await self._socket.close()
        if self._client is not None:
            await self._client.close()

    async def _send(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        number = next(self._ids)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        try:
            answer = await asyncio.wait_for(future, 30)
        finally:
            self._answers.pop(number, None)  # drop a late answer
        if "error" in answer:
            raise AssertionError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            event = json.loads(message.data)
            if "id" in event:
                waiting = self._answers.pop(event["id"], None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(event)
            else:
                self._note(event["method"], event["params"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.errors.append(json.dumps(params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
