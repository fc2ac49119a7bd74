"""A user's own configuration as flat keys: TOML, YAML, JSON, command-line flags or `key=value` words.

Nested tables become dotted keys. A file is data: nothing that it names is imported, and a Python file is not run.
"""

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from autopar.errors import ArgumentError

MOST_BYTES = 10**6

Flat = Mapping[str, Any]


def flat_keys(text: str, name: str) -> dict[str, Any]:
    """Keys and values of a configuration file.

    Args:
        text: its content.
        name: its name; the ending says the format, what has none of the endings is read as flags or words.

    Raises:
        ArgumentError: if the text is too long, or not of its format.
    """
    if len(text) > MOST_BYTES:
        raise ArgumentError(f"{name} has {len(text):,} characters; a configuration has at most {MOST_BYTES:,}")
    ending = name.rsplit(".", 1)[-1].lower()
    try:
        if ending == "json":
            return dict(_walk(json.loads(text)))
        if ending == "toml":
            return dict(_walk(tomllib.loads(text)))
        if ending in ("yaml", "yml"):
            return dict(_walk(_yaml(text)))
        return _flags(text, name)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(f"{name} is no {ending.upper()} that can be read: {error}") from error


def _yaml(text: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _walk(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if not isinstance(value, Mapping):
        if not prefix:
            raise ValueError(f"a table is expected, and it is a {type(value).__name__}")
        yield prefix, value
        return
    for key, inner in value.items():
        yield from _walk(inner, f"{prefix}.{key}" if prefix else str(key))


def _flags(text: str, name: str) -> dict[str, Any]:
    """Of a shell script or a line of words: `--a 1`, `--a=1`, `--a` alone (true), `a=1`; quotes and comments as a
    shell has them, line ends with a backslash joined."""
    joined = re.sub(r"\\\n", " ", text)
    try:
        words = shlex.split(joined.replace(",", " ") if "--" not in joined else joined, comments=True)
    except ValueError as error:
        raise ArgumentError(f"{name} cannot be read as flags: {error}") from error
    found: dict[str, Any] = {}
    pending: str | None = None
    for word in words:
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            found[key] = value if equals else True
            pending = None if equals else key
        elif re.fullmatch(r"[\w-]+:[\w-]+", word):  # a subcommand, as activation-checkpoint:full
            key, _, value = word.partition(":")
            found[key], pending = value, None
        elif pending is not None:
            found[pending], pending = word, None
        elif re.fullmatch(r"[\w.]+=\S+", word):
            key, _, value = word.partition("=")
            found[key] = value
    if not found:
        raise ArgumentError(f"{name} has neither flags (--key value) nor words (key=value); nothing in it can be read")
    return found


def whole(keys: Flat, key: str, where: str) -> int | None:
    """The whole number of a key, None if it is not there.

    Raises:
        ArgumentError: if it is something else.
    """
    value = keys.get(key)
    if value is None or value == "auto":
        return None
    try:
        return int(str(value))
    except ValueError as error:
        raise ArgumentError(f"{where}: {key} is {value!r}, not a whole number") from error


def truth(keys: Flat, key: str) -> bool | None:
    """Whether a switch is on, None if it is not there."""
    value = keys.get(key)
    return None if value is None else str(value).lower() in ("true", "1", "yes", "on")
