"""A page in a real browser: chromium without a window, driven over its DevTools protocol."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from websockets.sync.client import connect

NEEDED = "no chromium on PATH: install Debian's package chromium (apt-get install chromium)"

# Nothing leaves the machine; root cannot have the sandbox, and the pages load nothing.
_OPTIONS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-sync", "--disable-background-networking", "--disable-component-update",
    "--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND", "--remote-debugging-port=0",
)  # fmt: skip


def find_chromium() -> str | None:
    """Return the program's path."""
    return shutil.which("chromium")


class Browser:
    """One chromium, and the page that it shows."""

    def __init__(self) -> None:
        """Start it with a profile of its own."""
        program = find_chromium()
        assert program, NEEDED
        self._profile = tempfile.TemporaryDirectory(prefix="chromium_", ignore_cleanup_errors=True)
        command = [program, *_OPTIONS, f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        port, path = self._port()
        self._socket = connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
        self._numbers = itertools.count(1)
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def _port(self) -> list[str]:
        file = Path(self._profile.name) / "DevToolsActivePort"
        deadline = time.monotonic() + 60
        while not (file.exists() and file.read_text().count("\n")):
            assert time.monotonic() < deadline and self._process.poll() is None, "no chromium"
            time.sleep(0.05)
        return file.read_text().split("\n")[:2]

    def _send(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._socket.send(json.dumps(message))
        while True:
            answer = json.loads(self._socket.recv(timeout=60))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def open(self, file: Path, width: int = 1400, height: int = 900) -> None:
        """Show a file, and forget what was heard before."""
        self.events.clear()
        phone = width < 600
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=phone,
        )  # fmt: skip
        self.prefer(dark=False)
        self._send("Page.navigate", url=file.resolve().as_uri())
        deadline = time.monotonic() + 60
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            assert time.monotonic() < deadline, "the page does not load"
            self.settle()

    def prefer(self, dark: bool) -> None:
        """Prefer a dark page, or a light one, from now on."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        if self._session and self.events:
            self.settle()

    def settle(self) -> None:
        """Let the page draw what it has to: two frames."""
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def run(self, expression: str) -> Any:
        """Return a JavaScript expression's value, a promise's when it is there."""
        result = self._send(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in result, result.get("exceptionDetails")
        return result["result"].get("value")

    def point(self, selector: str, click: bool = False) -> None:
        """Move the pointer to the middle of an element, scrolled to, and perhaps click."""
        where = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'}); const r = node.getClientRects()[0];"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        kinds = ("mouseMoved", "mousePressed", "mouseReleased") if click else ("mouseMoved",)
        for kind in kinds:
            self._send(
                "Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], clickCount=1,
                button="none" if kind == "mouseMoved" else "left",
            )  # fmt: skip
        self.settle()

    def drag(self, selector: str, start: float, end: float, clicks: int = 1) -> None:
        """Press the button at a part of an element's width, let it go at another."""
        left, top, width, height = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)});"
            " node.scrollIntoView({block: 'center'}); const r = node.getClientRects()[0];"
            " return [r.x, r.y, r.width, r.height]; })()"
        )
        for count in range(1, clicks + 1):
            for kind, at in (
                ("mouseMoved", start), ("mousePressed", start), ("mouseMoved", end),
                ("mouseReleased", end),
            ):  # fmt: skip
                self._send(
                    "Input.dispatchMouseEvent", type=kind, x=left + at * width, y=top + height / 2,
                    clickCount=count, button="left", buttons=1,
                )  # fmt: skip
                self.settle()

    def choose(self, selector: str, text: str) -> None:
        """Choose a select's option by its text, as a person's choice is told to the page."""
        self.run(
            f"(() => {{ const list = document.querySelector({json.dumps(selector)});"
            f" const wanted = [...list.options].findIndex(o => o.text === {json.dumps(text)});"
            " list.selectedIndex = wanted;"
            " list.dispatchEvent(new Event('change', {bubbles: true})); })()"
        )
        self.settle()

    def complaints(self) -> list[str]:
        """Return errors and warnings of the console, exceptions, and requests but for the page."""
        found = []
        for event in self.events:
            method, params = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                found.append(details.get("exception", {}).get("description") or details["text"])
            elif method == "Runtime.consoleAPICalled":
                found.append(f"console.{params['type']}")
            elif method == "Log.entryAdded":
                found.append(params["entry"]["text"])
            elif method == "Page.javascriptDialogOpening":
                found.append(f"dialog {params['message']}")
            elif method == "Network.requestWillBeSent" and params["type"] != "Document":
                found.append(f"request {params['request']['url']}")
        return found

    def close(self) -> None:
        """End it."""
        self._socket.close()
        self._process.terminate()
        self._process.wait(30)
        self._profile.cleanup()
