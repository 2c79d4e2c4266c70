"""A headless browser, driven through pipes by Chromium's DevTools protocol: no driver, no network, no dependency."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "headless_shell")


def find_browser() -> str | None:
    """Where a browser is that speaks the protocol."""
    return next((found for name in _NAMES if (found := shutil.which(name))), None)


class Page:
    """A page in a browser of its own.

    Attributes:
        errors: what the page wrote to the console as an error, and exceptions that nobody caught.
        requests: addresses that it asked for.
    """

    def __init__(self, browser: str, file: Path, size: tuple[int, int] = (1400, 900), dark: bool = False) -> None:
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._profile = tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True)
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        command = [
            browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe",
            f"--user-data-dir={self._profile.name}", f"--window-size={size[0]},{size[1]}", "about:blank",
        ]  # fmt: skip
        # The protocol is spoken over descriptors 3 and 4.
        shell = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "browser", *command]
        self._process = subprocess.Popen(
            shell, pass_fds=(to_browser, from_browser), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(to_browser)
        os.close(from_browser)
        self._received = b""
        self._number = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page", "Network"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=file.absolute().as_uri())
        self.wait_for("window.asyncppTrace && window.asyncppTrace.ready")
        self.frame()

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser for something, and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression: str, timeout: float = 30.0) -> None:
        deadline = time.monotonic() + timeout
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < deadline, f"{expression} did not become true; errors: {self.errors}"
            time.sleep(0.05)

    def frame(self) -> None:
        """Wait until what was changed is drawn."""
        self.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(0))))")

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        """A movement (``mouseMoved``), a press, a release or a turn of the wheel, at a place of the window."""
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)
        self.frame()

    def key(self, key: str) -> None:
        """Press a key and let it go."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, text=key if len(key) == 1 else "")
        self.frame()

    def screenshot(self, path: Path) -> None:
        self.frame()
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def __enter__(self) -> Page:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self, timeout: float = 60.0) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._read], [], [], timeout)
            assert ready, "the browser does not answer"
            read = os.read(self._read, 1 << 20)
            assert read, f"the browser ended with code {self._process.wait()}"
            self._received += read
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, details = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(details["exceptionDetails"])[:500])
        elif method == "Log.entryAdded" and details["entry"]["level"] == "error":
            self.errors.append(details["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and details["type"] in ("error", "assert"):
            self.errors.append(json.dumps(details["args"])[:500])
        elif method == "Network.requestWillBeSent":
            self.requests.append(details["request"]["url"])
