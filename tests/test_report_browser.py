"""A page about a plan in a real browser: it is drawn, logs nothing, asks for nothing, and a keyboard suffices."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from autopar.report.page import write_page
from autopar.report.page_data import page_data
from tests.browser import HOW, Browser, find_browser
from tests.report_cases import HOSTILE, flat_plan, staged_plan

pytestmark = pytest.mark.skipif(find_browser() is None, reason=HOW)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as made:
        yield made


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a plan beside one in stages, named by one who means ill."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    flat, staged = flat_plan("fsdp"), staged_plan()
    data = page_data([flat._pictured(HOSTILE, None), staged._pictured("b.json", None)], flat.diff(staged))
    first = replace(data.plans[0], model=HOSTILE, baselines={"megatron": 1.0, HOSTILE: HOSTILE})
    write_page(replace(data, plans=(first, data.plans[1])), path)
    return path


def test_a_page_is_drawn_and_asks_for_nothing(browser: Browser, page: Path) -> None:
    browser.size(1280, 6000)
    browser.asked.clear()
    browser.open(page)
    browser.drawn()
    assert browser.logged == []
    assert browser.asked == [page.resolve().as_uri()]
    assert browser.run("window.hacked") is None
    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    shown = browser.run("[...document.querySelectorAll('section')].map((one) => one.id)")
    wanted = ["overview", "step", "baselines", "stages", "timeline", "memory", "sent", "model", "difference"]
    assert shown == wanted
    inked = """[...document.querySelectorAll('.chart')].map((chart) => {
        const canvas = chart.querySelector('canvas');
        const data = canvas ? canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data : [];
        const found = new Set();
        for (let i = 0; i + 2 < data.length; i += 4 * 7) found.add(`${data[i]} ${data[i + 1]} ${data[i + 2]}`);
        return found.size;
    })"""
    assert min(browser.run(inked)) > 5, "each chart has colours"
    text = browser.run("document.querySelector('main').textContent")
    assert "all-gather over data" in text and "stage 1" in text and "split by batch" in text
    labels = browser.run("[...document.querySelectorAll('.chart')].every((one) => one.getAttribute('aria-label'))")
    assert labels


def test_a_phone_is_wide_enough(browser: Browser, page: Path) -> None:
    browser.size(390, 844, is_phone=True)
    browser.open(page)
    browser.drawn()
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.logged == []


def test_a_keyboard_suffices(browser: Browser, page: Path) -> None:
    browser.size(1280, 900)
    browser.open(page)
    browser.press("Tab")
    assert browser.run("document.activeElement.className") == "skip"
    focus = "document.activeElement.closest('li')?.querySelector('.what').textContent"
    browser.run("document.querySelector('.tree summary').focus()")
    browser.press("ArrowLeft")
    assert not browser.run("document.activeElement.parentElement.open")
    browser.press("ArrowRight")
    assert browser.run("document.activeElement.parentElement.open")
    first = browser.run(focus)
    browser.press("ArrowDown")
    assert browser.run(focus) != first
    assert browser.run("document.activeElement.tagName") == "BUTTON"
    browser.press("Enter")
    assert browser.run("document.activeElement.getAttribute('aria-pressed')") == "true"
    name = browser.run("document.activeElement.closest('.what').textContent")
    assert browser.run("document.querySelector('.shards h3').textContent").split(" › ")[-1] in name
    assert browser.logged == []
