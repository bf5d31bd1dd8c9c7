"""Headless Chromium, controlled through its DevTools protocol over a pair of pipes, without a driver or library.

The protocol: https://chromedevtools.github.io/devtools-protocol/. Messages are JSON; each ends with a zero byte.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import select
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from PIL import Image

#: Longer than any condition that a test waits for in a page.
_CALL_S = 40.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-breakpad",
    "--disable-features=SpareRendererForSitePerProcess,Translate,MediaRouter",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)


class Browser:
    """One browser with one tab.

    Args:
        profile: An empty directory for the browser's profile.
    """

    def __init__(self, profile: Path) -> None:
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4.
        shell = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
        command = ["bash", "-c", shell, "chromium", *_FLAGS, f"--user-data-dir={profile}", "about:blank"]
        log = (profile / "chromium.log").open("wb")
        with log:
            self._process = subprocess.Popen(
                command, pass_fds=(to_browser, from_browser), stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._session = ""
        #: Console output and uncaught errors of the page.
        self.complaints: list[str] = []
        (page,) = (each["targetId"] for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and wait for its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        for answer in self._messages(_CALL_S):
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
        raise AssertionError(f"Chromium does not answer {method}")

    def _messages(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Yield messages as they arrive, until none has arrived for the given time."""
        while True:
            head, found, rest = self._buffer.partition(b"\0")
            if found:
                self._buffer = rest
                message = json.loads(head)
                self._note(message.get("method", ""), message.get("params", {}))
                yield message
                continue
            ready, _, _ = select.select([self._from], [], [], timeout_s)
            if not ready:
                return
            content = os.read(self._from, 1 << 20)
            assert content, "Chromium has ended"
            self._buffer += content

    def _note(self, method: str, event: Mapping[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.complaints.append(str(event["exceptionDetails"].get("exception", event["exceptionDetails"])))
        elif method == "Log.entryAdded" and event["entry"]["level"] in {"error", "warning"}:
            self.complaints.append(f"{event['entry']['text']} {event['entry'].get('url', '')}")
        elif method == "Runtime.consoleAPICalled":
            self.complaints.append(str(event["args"]))

    def open(self, url: str) -> None:
        """Open a URL."""
        answer = self.call("Page.navigate", url=url)
        assert "errorText" not in answer, answer

    def run(self, script: str) -> Any:
        """Evaluate an expression in the page, and return its value."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def until(self, script: str, limit_s: float = 15.0) -> Any:
        """Return the value of an expression as soon as it is true. The page itself polls it."""
        value = self.run(
            f"""new Promise((found) => {{
                const end = performance.now() + {limit_s * 1e3};
                const look = () => {{
                    const value = {script};
                    if (value || performance.now() > end) found(value); else setTimeout(look, 40);
                }};
                look();
            }})"""
        )
        assert value, f"never true: {script}\n{self.run('document.body.innerText')}"
        return value

    def looks(self, *, width: int, height: int, scheme: str, is_phone: bool = False) -> None:
        """Set the size of the screen, and the reader's preference for light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, path: Path) -> Image.Image:
        """Return a picture of the entire page, and write it to a file."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        content = base64.b64decode(found["data"])
        path.write_bytes(content)
        return Image.open(io.BytesIO(content)).convert("RGB")

    def press(self, key: str) -> None:
        """Press and release a key."""
        code = {"Tab": 9}[key]
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        with contextlib.suppress(AssertionError, OSError):
            self.call("Browser.close")
        os.close(self._to)
        os.close(self._from)
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
