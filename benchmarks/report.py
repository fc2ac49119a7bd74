"""How long does a browser take to open a page about a plan, and how large is the page?

    python -m benchmarks.report [--plans 8b,70b,70b-staged] [--opens 5] [--shots FOLDER]

Each plan is made, its page written, and opened so often at 1280 x 900 in Chromium without a window, a new navigation
each time. First paint and the load event are the browser's own (`performance`), in ms from the start of the navigation.
--shots: PNGs of the page's sections, at 1280 px and as a phone of 390 px shows them.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

import autopar
from autopar.models import load_model
from benchmarks.planning_time import TARGETS
from tests.browser import Browser

PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "8b": ("8b", {"mesh": "8x8"}),
    "70b": ("70b", {"mesh": "64x8"}),
    "70b-staged": ("70b", {"baseline": "megatron:tp=8,pp=8,schedule=1f1b,recompute=full", "microbatches": 16}),
}
TIMES = """JSON.stringify([
    performance.getEntriesByType('paint').find((one) => one.name === 'first-contentful-paint')?.startTime ?? null,
    performance.getEntriesByType('navigation')[0].loadEventEnd])"""
SHOTS = ("overview", "baselines", "timeline", "memory", "sent", "model")


def written(name: str, page: Path) -> list[str]:
    """What the plan is and how long its page takes to write, as cells of a row."""
    target, options = PLANS[name]
    cluster, batch, config = TARGETS[target]
    loaded = load_model(
        spec="hf:examples/llama3_8b",
        batch=batch,
        seq=8192,
        overrides={key: str(value) for key, value in config.items()},
        precision="bf16",
        device="meta",
    )
    called = {"args": loaded.args, "kwargs": loaded.kwargs, "precision": "bf16", "cluster": cluster}
    plan = autopar.plan(loaded.model, **called, check=False, with_baselines=target == "8b", **options)
    began = time.monotonic()
    plan.report(page, names=(name, ""))
    seconds = time.monotonic() - began
    return [name, f"{cluster}, {plan.arrangement}", f"{seconds:.1f}", f"{page.stat().st_size / 1e6:.2f}"]


def opened(page: Path, browser: Browser, opens: int) -> list[str]:
    """First paint and load in ms, the median and the most."""
    browser.size(1280, 900)
    paints, loads = [], []
    for _ in range(opens):
        browser.open(page)
        browser.drawn()
        paint, load = json.loads(browser.run(TIMES))
        paints.append(paint)
        loads.append(load)
    assert browser.logged == [], browser.logged
    return [_both(paint for paint in paints if paint is not None), _both(loads)]


def _both(times: Iterable[float]) -> str:
    found = list(times)
    return f"{statistics.median(found):.0f} ({max(found):.0f})" if found else "not said"


def shot(page: Path, browser: Browser, folder: Path, name: str) -> None:
    """PNGs of the sections of a page."""
    for width, is_phone in ((1280, False), (390, True)):
        browser.size(width, 4000, is_phone=is_phone)
        browser.open(page)
        present = browser.run("[...document.querySelectorAll('section')].map((one) => one.id)")
        for section in (name for name in SHOTS if name in present):
            browser.run(f"document.getElementById('{section}').scrollIntoView()")
            browser.run("new Promise((done) => setTimeout(() => done(1), 500))")  # what came into sight is drawn
            browser.picture(folder / f"{name}-{section}-{width}.png", f"#{section}")


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--opens", type=int, default=5)
    parser.add_argument("--shots", type=Path)
    given = parser.parse_args()
    table = Table("plan", "where", "written in s", "MB", "first paint ms", "load ms", title="median (most)")
    with tempfile.TemporaryDirectory() as folder, Browser(Path(folder) / "profile") as browser:
        for name in given.plans.split(","):
            page = Path(folder) / f"{name}.html"
            row = written(name, page)
            table.add_row(*row, *opened(page, browser, given.opens))
            if given.shots is not None:
                given.shots.mkdir(parents=True, exist_ok=True)
                shot(page, browser, given.shots, name)
    Console(width=120, file=sys.stdout).print(table)


if __name__ == "__main__":
    main()
