"""A headless Chromium, driven over its DevTools protocol."""

import itertools
import json
import shutil
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path

from websockets.sync.client import connect

PROGRAM = next(
    (p for p in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if p), None
)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
    "--remote-allow-origins=*",
]


class Browser:
    """One page, with everything it says and asks for recorded. A context manager."""

    def __enter__(self):
        self._home = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [PROGRAM, *FLAGS, f"--user-data-dir={self._home.name}", "about:blank"]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        address = next(
            line for line in self._process.stderr if "DevTools listening" in line
        ).split()[-1]
        with urllib.request.urlopen(f"http://{address.split('/')[2]}/json") as answer:
            page = next(t for t in json.load(answer) if t["type"] == "page")
        self._connection = connect(page["webSocketDebuggerUrl"], max_size=None)
        self._socket = self._connection.__enter__()
        self._numbers = itertools.count(1)
        self.events = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *error):
        self._connection.__exit__(*error)
        self._process.terminate()
        self._process.wait(timeout=20)
        self._process.stderr.close()
        self._home.cleanup()

    def call(self, method, **params):
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message.get("id") == number:
                assert "error" not in message, message["error"]
                return message["result"]
            self.events.append(message)

    def run(self, script):
        """The value of a JavaScript expression."""
        found = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script, seconds=30):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.05)

    def open(self, path: Path, *, width=1100, height=900, dark=False):
        """Open a file with the network off, and wait until its scripts have run."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call(
            "Network.emulateNetworkConditions",
            offline=True,
            latency=0,
            downloadThroughput=0,
            uploadThroughput=0,
        )
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState == 'complete' && !!window.vegaEmbed")

    def show(self, selector):
        """Scroll to an element, wait until the chart in it is drawn, and say where it is."""
        self.run(
            f"document.querySelector({selector!r}).scrollIntoView({{block: 'center', behavior: 'instant'}})"
        )
        self.wait(f"document.querySelector({selector!r}).classList.contains('drawn')")
        return self.run(f"document.querySelector({selector!r}).getBoundingClientRect().toJSON()")

    def point(self, x, y):
        """Move the mouse there."""
        for step in (-3, 0):
            self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + step, y=y)

    def complaints(self):
        """Errors and warnings on the console, and exceptions."""
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"]["text"])
            if event.get("method") == "Runtime.consoleAPICalled" and params["type"] in (
                "error",
                "warning",
            ):
                found.append([a.get("value") or a.get("description") for a in params["args"]])
            if event.get("method") == "Log.entryAdded" and params["entry"]["level"] in (
                "error",
                "warning",
            ):
                found.append(params["entry"]["text"])
        return found

    def requests(self):
        """Addresses the page asked for."""
        asked = [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]
        return [url for url in asked if not url.startswith("data:")]
