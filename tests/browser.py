"""Chromium without a window, driven over a pipe by its DevTools protocol: what a page shows, logs and asks for.

https://chromedevtools.github.io/devtools-protocol/ (Page, Runtime, Log, Network, Emulation)
"""

import base64
import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
HOW = "no Chromium on this machine: apt-get install chromium (Debian, Ubuntu), or have `chromium` on the PATH"


def find_browser() -> str | None:
    """The path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """A browser with one page. `logged` is what the page logged or threw, `asked` the addresses that it asked for."""

    def __init__(self, profile: Path) -> None:
        path = find_browser()
        assert path is not None, HOW
        read, to_browser = os.pipe()
        from_browser, write = os.pipe()
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        flags += ["--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"]
        given, answers = (fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read, write))  # it reads 3 and writes 4
        ends = [(os.POSIX_SPAWN_DUP2, given, 3), (os.POSIX_SPAWN_DUP2, answers, 4)]
        quiet = (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0)
        self._process = os.posix_spawn(path, [path, *flags], os.environ, file_actions=[*ends, quiet])
        for end in (read, write, given, answers):
            os.close(end)
        self._to, self._from = to_browser, from_browser
        self._number, self._session, self._buffer = 0, "", b""
        self.logged: list[str] = []
        self.asked: list[str] = []
        self._loaded = False
        [target] = [one for one in self.call("Target.getTargets")["targetInfos"] if one["type"] == "page"]
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        self._number += 1
        number = self._number
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        text = json.dumps(message).encode() + b"\0"
        while text:
            text = text[os.write(self._to, text) :]
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            read = os.read(self._from, 1 << 16)
            assert read, "the browser ended"
            self._buffer += read
        text, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        given = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.asked.append(given["request"]["url"])
        elif message.get("method") == "Runtime.consoleAPICalled":
            self.logged.append(" ".join(str(one.get("value", one.get("description"))) for one in given["args"]))
        elif message.get("method") == "Runtime.exceptionThrown":
            self.logged.append(given["exceptionDetails"]["exception"].get("description", "an exception"))
        elif message.get("method") == "Log.entryAdded":
            self.logged.append(given["entry"]["text"])
        elif message.get("method") == "Page.loadEventFired":
            self._loaded = True
        return message

    def size(self, width: int, height: int, *, is_phone: bool = False) -> None:
        """Of the page in pixels of CSS."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_phone
        )

    def open(self, page: Path) -> None:
        """Load a file."""
        self._loaded = False
        self.call("Page.navigate", url=page.resolve().as_uri())
        while not self._loaded:
            self._next()

    def run(self, script: str) -> Any:
        """The value of an expression on the page, which JSON can hold."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release a key, such as `Tab`, `Enter` or `ArrowDown`."""
        more = {"text": "\r"} if key == "Enter" else {}
        codes = {"Tab": 9, "Enter": 13, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            own = more if kind == "keyDown" else {}
            code = codes[key]
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **own)

    def drawn(self) -> None:
        """Wait until two more frames are drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))")

    def picture(self, path: Path, selector: str = "body") -> None:
        """A PNG of the whole of an element."""
        box = self.run(
            f"(() => {{ const r = document.querySelector({json.dumps(selector)}).getBoundingClientRect();"
            " return [r.x + scrollX, r.y + scrollY, r.width, r.height]; })()"
        )
        clip = dict(zip(("x", "y", "width", "height"), box, strict=True)) | {"scale": 1}
        shot = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def __enter__(self) -> "Browser":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._session = ""
        self.call("Browser.close")
        os.waitpid(self._process, 0)
        os.close(self._to)
        os.close(self._from)
