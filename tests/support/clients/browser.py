# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium without a window, driven through its debugging pipe; and axe-core in a page."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.clients.tools import tool

_PATIENCE_S = 60.0
_PROGRAMS = ("chromium-headless-shell", "chromium")


class Browser:
    """A running browser with one page. Requests are answered in their order."""

    def __init__(self, process: subprocess.Popen[bytes], to: int, back: int) -> None:
        self._process = process
        self._to = to
        self._back = back
        self._read = b""
        self._number = 0
        self._session = ""
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self._ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        self.complaints: list[str] = []
        """Messages of the console on the pages: refused by the policy, not found, ..."""

    def show(self, url: str, *, width: int, dark: bool) -> None:
        """Load a page, as wide as that, in a colour scheme, and wait until it is there."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=900,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._ask("Emulation.setEmulatedMedia", features=[scheme])
        self._loaded = False
        found = self._ask("Page.navigate", url=url)
        assert "errorText" not in found, found
        self._wait()

    def follow(self, script: str) -> None:
        """Run something in the page that leads to another one, and wait until that is there."""
        self._loaded = False
        self.run(script)
        self._wait()

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while not self._loaded:
            self._receive(deadline)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, which may be a promise."""
        found = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def choose(self, selector: str, path: Path) -> None:
        """Choose a file in the field of a form."""
        root = self._ask("DOM.getDocument")["root"]["nodeId"]
        node = self._ask("DOM.querySelector", nodeId=root, selector=selector)["nodeId"]
        self._ask("DOM.setFileInputFiles", files=[str(path)], nodeId=node)

    def picture(self, path: Path) -> None:
        """Write all of the page into a PNG file."""
        found = self._ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def violations(self, axe: str) -> list[str]:
        """The violations that axe-core, whose text is given, finds in the page, a line for each."""
        self.run(axe)
        found = self.run("axe.run(document, {resultTypes: ['violations']})")
        return [
            f"{each['id']}: {node['html'][:200]} {node['failureSummary'][:300]}"
            for each in found["violations"]
            for node in each["nodes"]
        ]

    def _ask(self, method: str, **parameters: object) -> dict[str, Any]:
        self._number += 1
        message: dict[str, object] = {
            "id": self._number, "method": method, "params": parameters,
        }  # fmt: skip
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._to, data) :]
        deadline = time.monotonic() + _PATIENCE_S
        while True:
            reply = self._receive(deadline)
            if reply.get("id") == self._number:
                assert "error" not in reply, reply
                result: dict[str, Any] = reply["result"]
                return result

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._back], [], [], deadline - time.monotonic())
            assert ready, "the browser does not answer"
            data = os.read(self._back, 1 << 20)
            assert data, f"the browser has ended with {self._process.poll()}"
            self._read += data
        text, _, self._read = self._read.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        method = message.get("method")
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Log.entryAdded":
            self.complaints.append(message["params"]["entry"]["text"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(message["params"]))
        return message


@contextlib.contextmanager
def browsing(home: Path) -> Iterator[Browser]:
    """Run a browser with a profile of its own until the end of the block."""
    program = next((found for each in _PROGRAMS if (found := shutil.which(each))), None)
    program = program or str(tool(_PROGRAMS[0]))
    to_read, to = os.pipe()
    back, back_write = os.pipe()
    profile = home / "browser-profile"
    words = [
        program, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--remote-debugging-pipe", f"--user-data-dir={profile}", "--hide-scrollbars",
    ]  # fmt: skip

    # The browser reads from descriptor 3 and writes to 4.
    script = f'exec 3<&{to_read} 4>&{back_write}; exec "$0" "$@"'
    with (home / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, *words],
            pass_fds=[to_read, back_write],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    os.close(to_read)
    os.close(back_write)
    try:
        yield Browser(process, to, back)
    finally:
        os.close(to)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
        process.kill()
        process.wait()
        os.close(back)
        shutil.rmtree(profile, ignore_errors=True)
