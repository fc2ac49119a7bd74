"""Which tables has a cluster file, and which figures have they? docs/files.md says what each means.

A figure is a number, or `{ value = number, source = "where it comes from" }`. A table's own `source` holds for its
plain numbers.
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from autopar.values.schema import Count, Word, of_file

Sources = tuple[tuple[str, str], ...]
"""Pairs (field, source)."""


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number and where it comes from."""

    value: float
    source: Word


Number = float | Figure


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class LineTable:
    """A `Line`."""

    alpha: Number
    bandwidth: Number
    launch: Number | None = None
    source: Word | None = None
    protocol: Word = ""
    algorithm: Word = ""
    kind: Word = ""
    members: Annotated[int, Field(ge=0, le=1 << 40)] = 0
    above: float = 0.0
    up_to: float | None = None


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTable:
    """A `LinkLevel`."""

    name: Word
    size: Count
    alpha: Number
    bandwidth: Number
    launch: Number | None = None
    line_rate: Number | None = None
    devices_per_link: Number | None = None
    skew: Number | None = None
    scope: Word = "network"
    lines: tuple[LineTable, ...] = ()
    in_network: LineTable | None = None
    shared_by_node: bool = False
    source: Word | None = None


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class NamedLevelTable:
    """A `LinkLevel` of a known link, and what differs from that."""

    link: Word
    size: Count
    name: Word | None = None
    alpha: Number | None = None
    bandwidth: Number | None = None
    launch: Number | None = None
    line_rate: Number | None = None
    devices_per_link: Number | None = None
    skew: Number | None = None
    scope: Word | None = None
    lines: tuple[LineTable, ...] | None = None
    in_network: LineTable | None = None
    shared_by_node: bool | None = None
    source: Word | None = None


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTable:
    """A `Device`."""

    name: Word
    memory_bytes: Number
    memory_bandwidth: Number
    launch_seconds: Number
    efficiency: Number
    peak_flops: Mapping[Word, Number]
    attention: Number | None = None
    attention_per_head: Number | None = None
    attention_per_key: Number | None = None
    launch_in_step: Number | None = None
    bytes_in_step: Number | None = None
    flops_in_step: Number | None = None
    optimizer_bytes: Number | None = None
    replay_launches: Number | None = None
    source: Word | None = None


def _kind_of_level(table: Any) -> str:
    return "link" if isinstance(table, Mapping) and "link" in table else "own"


AnyLevel = Annotated[
    Annotated[LevelTable, Tag("own")] | Annotated[NamedLevelTable, Tag("link")], Discriminator(_kind_of_level)
]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterTable:
    """A `Cluster`; device: a preset's name or a table."""

    name: Word
    device: Word | DeviceTable
    levels: tuple[AnyLevel, ...]
    library: Word | None = None


def figures(table: Any, keys: tuple[str, ...]) -> tuple[dict[str, float], Sources]:
    """Values and sources of those of `keys` that a table has."""
    return sourced({key: value for key in keys if (value := getattr(table, key)) is not None}, table.source)


def sourced(given: Mapping[str, Any], source: str | None) -> tuple[dict[str, float], Sources]:
    """Values and sources of figures; source: of those that are plain numbers."""
    values = {key: one.value if isinstance(one, Figure) else one for key, one in given.items()}
    own = {key: one.source if isinstance(one, Figure) else source for key, one in given.items()}
    return values, tuple((key, said) for key, said in own.items() if said is not None)


def figures_toml(values: Mapping[str, float], sources: Mapping[str, str]) -> list[str]:
    """Lines of figures that `figures` reads back; the most common source is written once, where every figure has
    one."""
    common = Counter(sources.values()).most_common(1)[0][0] if set(sources) == set(values) else None
    lines = [
        figure_line(key, value, None if sources.get(key) == common else sources.get(key))
        for key, value in values.items()
    ]
    return lines if common is None else [*lines, f"source = {quote(common)}"]


def figure_line(key: str, value: float, source: str | None) -> str:
    short = f"{value:.10g}"
    number = short if isinstance(value, float) and float(short) == value else repr(value)
    return f"{key} = {number}" if source is None else f"{key} = {{ value = {number}, source = {quote(source)} }}"


def quote(words: str) -> str:
    # A JSON string is a TOML basic string, but for DEL, which TOML wants escaped.
    return json.dumps(words, ensure_ascii=False).replace("\x7f", "\\u007f")
