"""How is a link level read from a `[[levels]]` table, and written to one?

    link = "infiniband-ndr"    all figures of a file of `cost_models/interconnects`; keys beside it override them
    alpha, bandwidth, launch   the general line: seconds a hop, bytes/s of a link, seconds a call
    line_rate, scope           what the link is built for, "node" or "network"
    devices_per_link           devices that share one link
    skew                       seconds by which a rank that computed comes late to a collective, on average
    [[levels.lines]]           further lines: alpha, bandwidth, launch for a protocol, algorithm or collective;
                               with members: for groups of that size, with above, up_to: for such messages
    [levels.in_network]        alpha, bandwidth of reduction in the switches

An interconnect file is such a table without a size; `shared_by_node = true` says that a machine has one such link.
"""

import math
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

from autopar.errors import ClusterError
from autopar.values.link import Line, LinkLevel
from autopar.values.toml_tables import Sources, check_keys, figure_line, figures, figures_toml, quote, text

_FIGURES = ("alpha", "bandwidth", "launch", "line_rate", "devices_per_link", "skew")
_PLAIN = {"launch": 0.0, "devices_per_link": 1, "skew": 0.0}
_LINE_FIGURES = ("alpha", "bandwidth", "launch")
_LINE_RANGE = {"members": 0, "above": 0.0, "up_to": math.inf}
_LINE_WORDS = ("protocol", "algorithm", "kind")
_OPTIONAL = {*_FIGURES, "scope", "lines", "in_network", "shared_by_node", "source"} - {"alpha", "bandwidth"}


def preset_links() -> tuple[str, ...]:
    """Names of the interconnects that a cluster may name."""
    folder = resources.files("autopar.cost_models") / "interconnects"
    return tuple(sorted(p.name.removesuffix(".toml") for p in folder.iterdir() if p.name.endswith(".toml")))


@cache
def preset_networks() -> tuple[str, ...]:
    """Those that join nodes."""
    return tuple(name for name in preset_links() if link_table(name, name)["scope"] == "network")


def link_table(name: str, where: str) -> dict[str, Any]:
    """The figures of an interconnect.

    Raises:
        ClusterError: if there is no such interconnect.
    """
    if name not in preset_links():
        raise ClusterError(f"{where}: link {name!r} is unknown; choose one of {', '.join(preset_links())}")
    file = resources.files("autopar.cost_models") / "interconnects" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def read_level(table: Any, devices_below: int, where: str, form: str) -> LinkLevel:
    """A level from its table, `devices_below` in each of the groups that it joins.

    Raises:
        ClusterError: if the table is not valid; `form` shows a valid one.
    """
    where = f"{where}: [[levels]]"
    if isinstance(table, Mapping) and "link" in table:
        beside = {key: value for key, value in table.items() if key != "link"}
        table = link_table(text(table, "link", where), where) | beside
    check_keys(table, {"name", "size", "alpha", "bandwidth"}, _OPTIONAL, where, form)
    values, sources = figures(table, _FIGURES, where, form)
    shared = devices_below if table.get("shared_by_node", False) else 1
    counts = {"size": table["size"], "devices_per_link": values.get("devices_per_link", shared)}
    for key, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int):
            raise ClusterError(f"{where}: {key} {count!r} must be a whole number")
    lines, line_sources = _lines(table.get("lines", []), where, form)
    in_network = None
    if "in_network" in table:
        in_network, own = _line(table["in_network"], f"{where} in_network", form)
        line_sources += tuple((f"in_network.{field}", source) for field, source in own)
    return LinkLevel(
        name=text(table, "name", where),
        size=table["size"],
        alpha=values["alpha"],
        bandwidth=values["bandwidth"],
        launch=values.get("launch", 0.0),
        devices_per_link=int(counts["devices_per_link"]),
        scope=text(table, "scope", where) if "scope" in table else "network",
        line_rate=values.get("line_rate"),
        lines=lines,
        in_network=in_network,
        skew=values.get("skew", 0.0),
        sources=sources + line_sources,
    )


def level_toml(level: LinkLevel) -> list[str]:
    """Lines of a `[[levels]]` table that `read_level` reads back as an equal value."""
    sources = dict(level.sources)
    out = ["[[levels]]", f"name = {quote(level.name)}", f"size = {level.size}", f"scope = {quote(level.scope)}"]
    values = {field: getattr(level, field) for field in _FIGURES}
    written = {field: value for field, value in values.items() if value not in (None, _PLAIN.get(field))}
    out += figures_toml(written, {field: sources[field] for field in written if field in sources})
    for number, line in enumerate(level.lines):
        out += ["", "[[levels.lines]]", *_line_toml(line, f"lines.{number}", sources)]
    if level.in_network is not None:
        out += ["", "[levels.in_network]", *_line_toml(level.in_network, "in_network", sources)]
    return out


def _lines(tables: Any, where: str, form: str) -> tuple[tuple[Line, ...], Sources]:
    if not isinstance(tables, list):
        raise ClusterError(f"{where}: lines must be [[levels.lines]] tables:\n{form}")
    found = [_line(table, f"{where} lines", form) for table in tables]
    sources = tuple((f"lines.{k}.{field}", source) for k, (_, own) in enumerate(found) for field, source in own)
    return tuple(line for line, _ in found), sources


def _line(table: Any, where: str, form: str) -> tuple[Line, Sources]:
    check_keys(table, {"alpha", "bandwidth"}, {"launch", "source", *_LINE_WORDS, *_LINE_RANGE}, where, form)
    values, sources = figures(table, _LINE_FIGURES, where, form)
    between, _ = figures(table, tuple(_LINE_RANGE), where, form)
    if not isinstance(between.get("members", 0), int):
        raise ClusterError(f"{where}: members {between['members']!r} must be a whole number")
    words = {key: text(table, key, where) for key in _LINE_WORDS if key in table}
    line = Line(
        alpha=values["alpha"],
        bandwidth=values["bandwidth"],
        launch=values.get("launch", 0.0),
        protocol=words.get("protocol", ""),
        algorithm=words.get("algorithm", ""),
        kind=words.get("kind", ""),
        members=int(between.get("members", 0)),
        above=between.get("above", 0.0),
        up_to=between.get("up_to", math.inf),
    )
    return line, sources


def _line_toml(line: Line, where: str, sources: Mapping[str, str]) -> list[str]:
    out = [f"{key} = {quote(getattr(line, key))}" for key in _LINE_WORDS if getattr(line, key)]
    out += [
        figure_line(key, getattr(line, key), None) for key, plain in _LINE_RANGE.items() if getattr(line, key) != plain
    ]
    values = {field: getattr(line, field) for field in _LINE_FIGURES}
    own = {field: sources[f"{where}.{field}"] for field in values if f"{where}.{field}" in sources}
    return out + figures_toml({k: v for k, v in values.items() if v or k in own or k != "launch"}, own)
