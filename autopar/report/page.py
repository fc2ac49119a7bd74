"""A page about a plan: one HTML file that opens without a network, its charts drawn by Apache ECharts.

What comes from files and models is data, never markup: it is JSON in which no character can end the element around it,
and the script writes it as text. A content policy lets the page load nothing and run no script but its own two, which
it names by their hashes.
"""

import base64
import hashlib
import html
import json
import re
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.errors import ArgumentError
from autopar.report.page_data import PageData
from autopar.values.whole_file import write_whole

SCRIPTS = ("units.js", "charts.js", "tables.js", "shards.js", "tree.js", "timeline.js", "memory.js", "page.js")
"""In this order they are one script."""
DIGITS = 6
"""Digits of a number on the page: as many as a reader could see, and half the bytes of all."""


def page_html(data: PageData) -> str:
    """The page as text."""
    library, script = _file("echarts.min.js"), "\n".join(map(_file, SCRIPTS))
    holes = {
        "title": html.escape(" beside ".join(f"{plan.model}: {plan.name}" for plan in data.plans)),
        "style": _file("page.css"),
        "policy": _policy(library, script),
        "data": inert_json(data.to_json()),
        "library": library,
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda hole: holes[hole[1]], _file("page.html"))


def write_page(data: PageData, path: str | Path) -> None:
    """Write the page to a file.

    Raises:
        ArgumentError: if it cannot be written.
    """
    try:
        write_whole(path, page_html(data))
    except OSError as error:
        raise ArgumentError(
            f"the report {path} cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from error


def inert_json(value: Any) -> str:
    """JSON that stays within its element whatever texts it holds: without `<`, `>`, `&` and ends of lines."""
    text = json.dumps(_rounded(value), separators=(",", ":"), allow_nan=False)
    return text.translate({ord(c): f"\\u{ord(c):04x}" for c in "<>&\u2028\u2029"})


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, list | tuple) else value


def _policy(*scripts: str) -> str:
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
        "form-action 'none'"
    )


def _file(name: str) -> str:
    return (resources.files("autopar.report") / "web" / name).read_text(encoding="utf-8")
