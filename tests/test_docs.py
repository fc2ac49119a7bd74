"""The manual is true: links resolve, commands and options exist, and the examples of the extending pages run."""

import importlib.util
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import typer.main

import autopar
from autopar.cli.main import app

ROOT = Path(__file__).resolve().parents[1]
MANUAL = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES = [page.relative_to(ROOT).as_posix() for page in MANUAL]
EXTENDING = sorted((ROOT / "docs" / "extending").glob("*.md"))

FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"(?<!\w)\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.DOTALL | re.MULTILINE)
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"`([\w./-]+\.(?:py|toml))`")
SPAN = re.compile(r"`([^`\n]+)`")

WRITTEN = {
    *("train.py", "model.py", "stage_0.py", "stage_1.py", "net.py", "file.py"),
    *("cluster.toml", "laptop.toml", "measured.toml"),
}
"""Files that a reader or a command writes."""
ELSEWHERE = {"stage3.py", "partition_parameters.py"}
"""Files of DeepSpeed."""


def links(page: Path) -> list[str]:
    """Where a page's links lead, those to the web left out."""
    prose = CODE.sub("`", page.read_text(encoding="utf-8"))
    return [link for link in LINK.findall(prose) if "://" not in link]


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> frozenset[str]:
    """Of each heading, as GitHub makes them."""
    lines = FENCE.sub("", page.read_text(encoding="utf-8")).splitlines()
    headings = [line.lstrip("#").strip() for line in lines if re.match(r"#{1,6} ", line)]
    return frozenset(re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings)


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    broken = []
    for link in links(ROOT / page):
        name, _, anchor = link.partition("#")
        target = ((ROOT / page).parent / name).resolve() if name else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def test_every_page_can_be_reached_from_the_map() -> None:
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        names = [link.partition("#")[0] for link in links(page)]
        waiting += [(page.parent / name).resolve() for name in names if name.endswith(".md")]
    assert set(MANUAL) - reached == set()


@cache
def files() -> frozenset[str]:
    """Every file, and every end of its path."""
    folders = ("autopar", "passes", "cost_models", "tests", "benchmarks", "examples")
    found = [*ROOT.glob("*.*"), *(file for folder in folders for file in (ROOT / folder).rglob("*.*"))]
    paths = [file.relative_to(ROOT) for file in found]
    return frozenset("/".join(path.parts[i:]) for path in paths for i in range(len(path.parts)))


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page: str) -> None:
    assert [name for name in FILE.findall(text(page)) if name not in files() | WRITTEN | ELSEWHERE] == []


@pytest.mark.parametrize("page", PAGES)
def test_names_beside_a_file_stand_in_it(page: str) -> None:
    """`Live.gradients` (`lower/live.py`): the page says where a reader finds it."""
    for name, file in re.findall(r"`([A-Za-z_.]+)` \(`([\w/]+\.py)`\)", text(page)):
        found = [path for folder in ("autopar", "passes", "cost_models") for path in (ROOT / folder).rglob("*.py")]
        sources = [path.read_text(encoding="utf-8") for path in found if path.as_posix().endswith("/" + file)]
        assert any(re.search(rf"\b{name.rpartition('.')[2]}\b", source) for source in sources), (name, file)


def commands(page: str) -> Iterator[list[str]]:
    """What the page calls as `autopar COMMAND ...`, in blocks and in the text; continued lines are one."""
    whole = text(page).replace("\\\n", " ")
    lines = [line for block in FENCE.findall(whole) for line in block.splitlines()]
    for line in [*lines, *SPAN.findall(FENCE.sub("", whole))]:
        words = line.partition("#")[0].replace("-m autopar.cli", "autopar").split()
        if "autopar" in words and (rest := words[words.index("autopar") + 1 :]) and re.fullmatch(r"[a-z]+", rest[0]):
            yield rest


@cache
def options() -> dict[str, frozenset[str]]:
    """Of each command."""
    group = typer.main.get_command(app)
    return {
        name: frozenset(option for parameter in command.params for option in parameter.opts)
        for name, command in group.commands.items()  # type: ignore[attr-defined]
    }


@pytest.mark.parametrize("page", PAGES)
def test_commands_and_their_options_exist(page: str) -> None:
    for command, *words in commands(page):
        assert command in options(), command
        words = words[: words.index("--")] if "--" in words else words  # what follows is another program's
        given = {option for word in words for option in re.findall(r"(?<!\w)--[a-z][a-z-]*", word)}
        assert given <= options()[command], (command, given - options()[command])


def test_the_reference_of_the_command_line_is_complete() -> None:
    page = text("docs/cli.md")
    every = set().union(*options().values())
    left_out = {option for option in every if option.startswith("--") and option not in page}
    assert left_out - {"--help"} == set()


def test_options_that_commands_share_are_theirs() -> None:
    """Of the commands in the heading, or of those that a row names."""
    heading, _, section = text("docs/cli.md").partition("## Options of ")[2].partition("\n")
    rows = [re.split(r"(?<!\\)\|", line)[1] for line in section.partition("\n## ")[0].splitlines() if line[:2] == "| "]
    for row in rows[1:]:
        named = set(SPAN.findall(row)) & options().keys() or set(re.findall(r"[a-z]+", heading)) & options().keys()
        known = [options()[command] for command in named]
        assert known and set(re.findall(r"--[a-z-]+", row)) <= frozenset.intersection(*known), row


@pytest.mark.parametrize("page", PAGES)
def test_benchmarks_and_their_options_exist(page: str) -> None:
    for name, words in re.findall(r"python (?:-m )?((?:benchmarks|examples)[\w./]*)([^`|\n]*)", text(page)):
        found = importlib.util.find_spec(name.removesuffix(".py").replace("/", ".").rstrip("."))
        assert found is not None and found.origin is not None, name
        source = Path(found.origin).read_text(encoding="utf-8")
        assert [option for option in re.findall(r"--[a-z][a-z-]*", words) if f'"{option}"' not in source] == [], name


@pytest.mark.parametrize("page", PAGES)
def test_names_of_the_package_exist(page: str) -> None:
    for name in re.findall(r"(?<![\w.])autopar\.([a-zA-Z_]+)", text(page)):
        assert hasattr(autopar, name) or importlib.util.find_spec(f"autopar.{name}"), name


@pytest.mark.parametrize("name", ["plan", "distribute"])
def test_arguments_of_the_python_reference_exist(name: str) -> None:
    section = text("docs/python.md").partition(f"## {name}\n")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.partition("| argument |")[2].split("\n\n")[0].splitlines()[2:]]
    named = {argument for row in rows for argument in SPAN.findall(row)}
    assert named and named <= set(inspect.signature(getattr(autopar, name)).parameters)


@pytest.mark.parametrize("page", PAGES)
def test_python_can_be_read(page: str) -> None:
    for block in BLOCK.findall(text(page)):
        compile(block, page, "exec")


@pytest.mark.parametrize("page", [page for page in EXTENDING if page.name != "README.md"], ids=lambda page: page.stem)
def test_examples_of_extending_run(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks of a page in one namespace, one after the other. What they register goes again."""
    from autopar.cost_models import algorithms, schedules
    from autopar.rules import registered, registry

    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(registered, "_REGISTERED", {})
    monkeypatch.setattr(schedules, "SCHEDULES", dict(schedules.SCHEDULES))
    for table in (algorithms.ALGORITHMS, algorithms.LIBRARIES):
        for kind, entry in list(table.items()):
            monkeypatch.setitem(table, kind, dict(entry))
    namespace: dict[str, object] = {"__name__": f"docs_{page.stem}"}
    blocks = BLOCK.findall(page.read_text(encoding="utf-8"))
    assert blocks, "a page of this folder has an example"
    for block in blocks:
        exec(compile(block, str(page), "exec"), namespace)
