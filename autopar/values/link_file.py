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
from autopar.values.choices import near
from autopar.values.cluster_tables import LevelTable, LineTable, Sources, figure_line, figures, figures_toml, quote
from autopar.values.link import Line, LinkLevel
from autopar.values.schema import checked

_FIGURES = ("alpha", "bandwidth", "launch", "line_rate", "devices_per_link", "skew")
_PLAIN = {"launch": 0.0, "devices_per_link": 1, "skew": 0.0}
_LINE_FIGURES = ("alpha", "bandwidth", "launch")
_LINE_RANGE = {"members": 0, "above": 0.0, "up_to": math.inf}
_LINE_WORDS = ("protocol", "algorithm", "kind")


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
        links = preset_links()
        raise ClusterError(f"{where}: link {name!r} is unknown; choose one of {', '.join(links)}{near(name, links)}")
    file = resources.files("autopar.cost_models") / "interconnects" / f"{name}.toml"
    return tomllib.loads(file.read_text(encoding="utf-8"))


def read_level(table: Mapping[str, Any], devices_below: int, where: str, form: str) -> LinkLevel:
    """A level from its table, `devices_below` in each of the groups that it joins.

    Raises:
        ClusterError: if the table is not valid; `form` shows a valid one.
    """
    try:
        return _level(table, devices_below, where, form)
    except ClusterError as error:
        raise error if str(error).startswith(where) else ClusterError(f"{where}: {error}") from error


def _level(table: Mapping[str, Any], devices_below: int, where: str, form: str) -> LinkLevel:
    if "link" in table:
        beside = {key: value for key, value in table.items() if key != "link"}
        table = link_table(str(table["link"]), where) | beside
    read = checked(LevelTable, table, where, ClusterError, f"it should look like this:\n{form}", partial=True)
    values, sources = figures(read, _FIGURES)
    shared = values.get("devices_per_link", devices_below if read.shared_by_node else 1)
    if shared != int(shared):
        raise ClusterError(f"{where}: devices_per_link {shared} must be a whole number")
    lines = [_line(line) for line in read.lines]
    sources += tuple((f"lines.{k}.{field}", said) for k, (_, own) in enumerate(lines) for field, said in own)
    in_network = None
    if read.in_network is not None:
        in_network, own = _line(read.in_network)
        sources += tuple((f"in_network.{field}", said) for field, said in own)
    return LinkLevel(
        name=read.name,
        size=read.size,
        alpha=values["alpha"],
        bandwidth=values["bandwidth"],
        launch=values.get("launch", 0.0),
        devices_per_link=int(shared),
        scope=read.scope,
        line_rate=values.get("line_rate"),
        lines=tuple(line for line, _ in lines),
        in_network=in_network,
        skew=values.get("skew", 0.0),
        sources=sources,
    )


def level_toml(level: LinkLevel) -> list[str]:
    """Lines of a `[[levels]]` table that `read_level` reads back as an equal value."""
    sources = dict(level.sources)
    out = ["[[levels]]", f"name = {quote(level.name)}", f"size = {level.size}", f"scope = {quote(level.scope)}"]
    values = {field: getattr(level, field) for field in _FIGURES}
    written = {
        field: value
        for field, value in values.items()
        if value is not None and (value != _PLAIN.get(field) or field in sources)
    }
    out += figures_toml(written, {field: sources[field] for field in written if field in sources})
    for number, line in enumerate(level.lines):
        out += ["", "[[levels.lines]]", *_line_toml(line, f"lines.{number}", sources)]
    if level.in_network is not None:
        out += ["", "[levels.in_network]", *_line_toml(level.in_network, "in_network", sources)]
    return out


def _line(table: LineTable) -> tuple[Line, Sources]:
    values, sources = figures(table, _LINE_FIGURES)
    line = Line(
        alpha=values["alpha"],
        bandwidth=values["bandwidth"],
        launch=values.get("launch", 0.0),
        protocol=table.protocol,
        algorithm=table.algorithm,
        kind=table.kind,
        members=table.members,
        above=table.above,
        up_to=math.inf if table.up_to is None else table.up_to,
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
