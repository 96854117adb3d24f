"""A page in a headless Chromium that a test clicks, by its DevTools protocol over a pipe."""

import base64
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.helpers.browser import browser

_FLAGS = "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"


class Driven:
    """A page that is open; `errors` are what its scripts and the browser complained of."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from, self._rest = to_browser, from_browser, b""
        self._number, self._session, self.errors = 0, {}, list[Any]()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> Any:
        """The answer of a method of the protocol."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            while b"\0" not in self._rest:
                data = os.read(self._from, 2**20)
                assert data, "the browser has ended"
                self._rest += data
            text, self._rest = self._rest.split(b"\0", 1)
            answer = json.loads(text)
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        size: Any = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", mobile=width < 700, **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, script: str, timeout_s: float = 60.0) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + timeout_s
        while not self.run(f"Boolean({script})"):
            assert time.monotonic() < end, (script, self.run("document.body.innerText"))
            time.sleep(0.05)

    def picture(self, path: Path, height: int | None = None) -> None:
        """Write a picture of the page, of its whole length if no height is given."""
        if height is None:
            size = self.call("Page.getLayoutMetrics")["cssContentSize"]
            clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
            made = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        else:
            made = self.call("Page.captureScreenshot")
        path.write_bytes(base64.b64decode(made["data"]))


@contextmanager
def driven(profile: Path) -> Iterator[Driven]:
    """Start a browser, and end it."""
    its_input, to_browser = os.pipe()
    from_browser, its_output = os.pipe()
    pipes = f'exec "$0" "$@" 3<&{its_input} 4>&{its_output}'
    command = ["bash", "-c", pipes, browser(), *_FLAGS, f"--user-data-dir={profile}"]
    process = subprocess.Popen(
        [*command, "--remote-debugging-pipe"],
        pass_fds=(its_input, its_output),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(its_input)
    os.close(its_output)
    try:
        yield Driven(to_browser, from_browser)
    finally:
        process.kill()
        process.wait()
        os.close(to_browser)
        os.close(from_browser)
