"""A headless Chromium, driven over its debugging pipe: JSON messages that end with a zero byte.

Nothing but the browser itself is needed.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from processes import HANG

# The browser reads its orders from descriptor 3 and writes to 4.
_LAUNCH = """
import os, sys
# Copies above 4 first: one of the two may be 3 or 4 itself.
read, write = (int(fd) for fd in sys.argv[1:3])
for fd in (read, write):
    os.set_inheritable(fd, True)
spare = []
while len(spare) < 8:
    spare.append(os.dup(read))
copies = [os.dup(read), os.dup(write)]
os.dup2(copies[0], 3)
os.dup2(copies[1], 4)
os.closerange(5, 256)
os.execvp(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One page in one window; errors and requests are collected."""

    def __init__(self, path: str):
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        to_read, self._orders = os.pipe()
        self._answers, to_write = os.pipe()
        options = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--no-first-run", "--no-default-browser-check", "--hide-scrollbars"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--force-color-profile=srgb", "--remote-debugging-pipe"),
            f"--user-data-dir={self._profile.name}",
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _LAUNCH, str(to_read), str(to_write), path, *options],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self._buffer, self._number = b"", 0
        self.errors: list[str] = []
        """Exceptions and console errors of the page."""
        self.requests: list[str] = []
        """Addresses the page asked for."""
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")

    def open(
        self,
        path: Path,
        view: str = "",
        *,
        width: int = 1280,
        height: int = 900,
        dark: bool = False,
    ) -> None:
        """Loads a file at `view`, from nothing: a page before it leaves no error behind."""
        self.resize(width, height)
        self.prefer(dark=dark)
        self._call("Page.navigate", {"url": "about:blank"})
        self.errors.clear()
        self.requests.clear()
        self._call("Page.navigate", {"url": path.absolute().as_uri() + view})
        self.wait("document.readyState === 'complete' && location.protocol === 'file:'")

    def resize(self, width: int, height: int) -> None:
        self._call(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600},
        )

    def prefer(self, *, dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", {"features": [feature]})

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = self._call(
            "Runtime.evaluate",
            {"expression": expression, "returnByValue": True, "awaitPromise": True},
        )
        if "exceptionDetails" in answer:
            details = answer["exceptionDetails"]
            said = details.get("exception", {}).get("description") or details["text"]
            raise RuntimeError(f"{expression}: {said}")
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        """Until an expression is true."""
        end = time.monotonic() + HANG
        while not self.evaluate(expression):
            if time.monotonic() > end:
                raise TimeoutError(expression)
            time.sleep(0.02)

    def move(self, x: float, y: float) -> None:
        """The mouse, as a person moves it."""
        self._call("Input.dispatchMouseEvent", {"type": "mouseMoved", "x": x, "y": y})

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", {"type": kind, "key": key})

    def close(self) -> None:
        os.close(self._orders)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._profile.cleanup()

    _session = None

    def _call(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        self._number += 1
        order: dict[str, Any] = {"id": self._number, "method": method, "params": parameters or {}}
        if self._session and not method.startswith("Target."):
            order["sessionId"] = self._session
        os.write(self._orders, json.dumps(order).encode() + b"\0")
        end = time.monotonic() + HANG
        while True:
            message = self._read(end, method)
            if message.get("id") == self._number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            self._notice(message)

    def _read(self, end: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(end - time.monotonic(), 0))
            data = os.read(self._answers, 1 << 20) if ready else b""
            if not data:
                raise RuntimeError(f"the browser does not answer {method}")
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def _notice(self, message: dict[str, Any]) -> None:
        method, parameters = message.get("method"), message.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = parameters["exceptionDetails"]
            self.errors.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning"):
            self.errors.append(" ".join(str(a.get("value", "")) for a in parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.errors.append(parameters["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
