"""What does `--set key=value` mean? Text becomes a value of the type that the key has; unknown keys name near ones."""

import ast
import json
from collections.abc import Mapping
from typing import Any

from autopar.errors import ArgumentError
from autopar.values.choices import near


def parse_literal(text: str) -> Any:
    """A Python or JSON literal (`4`, `0.1`, `true`, `[1, 2]`, `None`), else the text itself."""
    for parse in (ast.literal_eval, json.loads):
        try:
            return parse(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):  # deep or huge text is text
            continue
    return text


def apply_override(config: dict[str, Any], known: Mapping[str, Any], key: str, text: str) -> None:
    """Set `key` (dotted for nested ones) of a config's JSON, typed as it is `known`.

    Raises:
        ArgumentError: if there is no such key, or the text is not of its type.
    """
    *path, last = key.split(".")
    table, reference = config, known
    for part in path:
        if not isinstance(reference.get(part), Mapping):
            raise ArgumentError(f"the config has no group {part!r} (--set {key}={text}){near(part, reference)}")
        reference = reference[part]
        table = table.setdefault(part, dict(reference))
    if last not in reference:
        raise ArgumentError(f"the config has no key {key!r}{near(last, reference)}")
    table[last] = typed(key, text, reference[last])


def typed(key: str, text: str, current: Any) -> Any:
    """The text as a value of the type of `current`; any literal if that is None."""
    value = parse_literal(text)
    if current is None or value is None:
        return value
    if isinstance(current, str):
        return text
    if isinstance(current, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(current, list | tuple) and isinstance(value, list | tuple):
        return list(value)
    if type(value) is not type(current):
        raise ArgumentError(
            f"--set {key}={text}: the config's {key} is {current!r}, so give a {type(current).__name__}"
        )
    return value
