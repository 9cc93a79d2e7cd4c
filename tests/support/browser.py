"""A Chromium that tests steer: pages of any width, light or dark, with clicks and downloads.
It speaks the protocol of the browser's developer tools over two pipes, without a driver."""

import base64
import io
import json
import os
import subprocess
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import PIL.Image

_FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--force-color-profile=srgb"]


class Browser:
    """A page of a running Chromium. `errors` are the messages of its console."""

    def __init__(self, send, receive):
        self._send, self._receive, self._number = send, receive, 0
        self._session, self.errors, self._events = None, [], []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        opened = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = opened["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._send(message)
        while (answer := self._receive()).get("id") != self._number:
            self._take(answer)
        assert "error" not in answer, answer["error"]
        return answer["result"]

    def open(self, path, width=1100, dark=False, height=900):
        """Open a page, a file or that of a server, in a window of this size; a narrow one is that
        of a phone."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self._events.clear()
        is_served = str(path).startswith("http:")
        self.call("Page.navigate", url=path if is_served else Path(path).resolve().as_uri())
        self.wait_for("Page.loadEventFired")
        self.run("new Promise((done) => requestAnimationFrame(() => setTimeout(done, 0)))")

    def run(self, script):
        """Return the value of an expression of JavaScript, whose promise is awaited."""
        known = {"returnByValue": True, "awaitPromise": True, "userGesture": True}
        done = self.call("Runtime.evaluate", expression=script, **known)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_for(self, method, **known):
        """Wait for an event with these values since the last page was opened."""
        wanted = known.items()
        while not any(n == method and wanted <= params.items() for n, params in self._events):
            self._take(self._receive())

    def move(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, whole=True):
        """Return the pixels of the page, or of the part that the window shows."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **self._clip(whole))
        with PIL.Image.open(io.BytesIO(base64.b64decode(shot["data"]))) as opened:
            return np.asarray(opened.convert("RGB"))

    def content(self):
        return self.run("document.documentElement.outerHTML")

    def wider_than_page(self):
        """Return what reaches over the right edge of the page and has no scroll bar of its own."""
        return self.run(_WIDER)

    def _clip(self, whole):
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {**size, "scale": 1}}

    def _take(self, message):
        method, params = message.get("method"), message.get("params", {})
        self._events.append((method, params))
        if method == "Runtime.exceptionThrown":
            self.errors.append(params["exceptionDetails"]["text"])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


_WIDER = """(() => {
  const wide = document.documentElement.clientWidth;
  const scrolls = (element) => element && element !== document.body
    && (getComputedStyle(element).overflowX !== "visible" || scrolls(element.parentElement));
  return [...document.body.querySelectorAll("*")].filter((each) => {
    const box = each.getBoundingClientRect();
    return box.width && (box.right > wide + 0.5 || box.left < -0.5) && !scrolls(each.parentElement);
  }).map((each) => `${each.tagName} ${each.className} ${each.textContent.slice(0, 60)}`);
})()"""


@contextmanager
def start_browser(folder):
    """Start a Chromium whose profile is in this folder, and stop it afterwards."""
    ours, theirs = os.pipe(), os.pipe()  # what it reads, what it writes
    # Chromium reads descriptor 3 and writes descriptor 4.
    script = f'exec chromium "$@" 3<&{ours[0]} 4>&{theirs[1]}'
    words = [*_FLAGS, "--remote-debugging-pipe", f"--user-data-dir={folder}/profile"]
    process = subprocess.Popen(
        ["bash", "-c", script, "chromium", *words],
        pass_fds=(ours[0], theirs[1]),
        env=os.environ | {"HOME": str(folder)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    pending = bytearray()  # what has arrived of the next messages
    os.close(ours[0])
    os.close(theirs[1])
    with open(ours[1], "wb", buffering=0) as writer, open(theirs[0], "rb") as reader:

        def receive():
            while b"\0" not in pending:
                pending.extend(piece := reader.read1(2**20))
                assert piece, "Chromium has ended"
            text, _, pending[:] = pending.partition(b"\0")
            return json.loads(text)

        try:
            yield Browser(lambda m: writer.write(json.dumps(m).encode() + b"\0"), receive)
        finally:
            process.terminate()
            process.wait()
