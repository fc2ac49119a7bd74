"""How is a TOML table of figures read and written?

A figure is a number, or `{ value = number, source = "where from" }`. A table's own `source` holds for its plain
numbers.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from autopar.errors import ClusterError

Sources = tuple[tuple[str, str], ...]
"""Pairs (field, source)."""


def figures(table: Mapping[str, Any], keys: tuple[str, ...], where: str, form: str) -> tuple[dict[str, float], Sources]:
    """Values and sources of those of `keys` that the table has.

    Raises:
        ClusterError: if one is neither a number nor a number with its source; `form` shows how it should look.
    """
    values: dict[str, float] = {}
    sources: list[tuple[str, str]] = []
    for key in keys:
        if key not in table:
            continue
        figure = table[key]
        if isinstance(figure, Mapping):
            check_keys(figure, {"value", "source"}, set(), f"{where} {key}", form)
            sources.append((key, text(figure, "source", f"{where} {key}")))
            figure = figure["value"]
        elif "source" in table:
            sources.append((key, text(table, "source", where)))
        if isinstance(figure, bool) or not isinstance(figure, int | float):
            raise ClusterError(f"{where}: {key} {figure!r} must be a number or {{ value = number, source = text }}")
        values[key] = figure
    return values, tuple(sources)


def text(table: Mapping[str, Any], key: str, where: str) -> str:
    value = table[key]
    if not isinstance(value, str):
        raise ClusterError(f"{where}: {key} {value!r} must be text")
    return value


def check_keys(table: Any, required: set[str], optional: set[str], where: str, form: str) -> None:
    """Raises ClusterError, with `form`, unless `table` is a table with the keys required and none beyond the
    optional."""
    if not isinstance(table, Mapping):
        raise ClusterError(f"{where} must be a table, not {table!r}; a cluster file looks like this:\n{form}")
    missing, unknown = sorted(required - set(table)), sorted(set(table) - required - optional)
    if missing or unknown:
        raise ClusterError(
            f"{where}: missing keys {', '.join(missing) or 'none'}; unknown keys {', '.join(unknown) or 'none'}; "
            f"a cluster file looks like this:\n{form}"
        )


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
