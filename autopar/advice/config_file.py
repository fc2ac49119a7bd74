"""A user's own configuration as flat keys: TOML, YAML, JSON, command-line flags or `key=value` words.

Nested tables become dotted keys. A file is data: nothing that it names is imported, and a Python file is not run.
"""

import difflib
import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import yaml

from autopar.cost_models.training_config import TRUTH
from autopar.errors import ArgumentError
from autopar.values.choices import near

MOST_BYTES = 10**6
MISSPELT = 0.92
"""Keys at least so like one that is known (`difflib`) are taken for it, misspelt. Real ones are less like each other:
0.91 for Megatron-LM's tp-comm-overlap and tp-comm-overlap-ag."""

T = TypeVar("T")


class Keys:
    """What a configuration says, each key asked for by its name; what is nobody's question can be told at the end.

    Dashes and underscores are the same; a value that is null or "auto" is as if it were not there.
    """

    def __init__(self, text: str, name: str) -> None:
        """Of a file's content and its name.

        Raises:
            ArgumentError: if it cannot be read.
        """
        self.name = name
        self._values = {_normal(key): value for key, value in flat_keys(text, name).items()}
        self._asked: set[str] = set()

    def value(self, key: str) -> Any:
        """The value of a key, None if it is not there."""
        self._asked.add(_normal(key))
        value = self._values.get(_normal(key))
        return None if value == "auto" else value

    def whole(self, key: str, least: int = 1) -> int | None:
        """The whole number of a key, None if it is not there.

        Raises:
            ArgumentError: if it is something else, or less than the least.
        """
        value = self.value(key)
        try:
            number = None if value is None else int(str(value))
        except ValueError as error:
            raise ArgumentError(f"{self.name}: {key} is {value!r}, not a whole number") from error
        if number is not None and number < least:
            raise ArgumentError(f"{self.name}: {key} is {number}; it is at least {least}")
        return number

    def truth(self, key: str) -> bool:
        """Whether a switch is there and on.

        Raises:
            ArgumentError: if it is neither on nor off.
        """
        return self.choice(key, TRUTH, False)

    def choice(self, key: str, known: Mapping[str, T], default: T) -> T:
        """What the word of a key stands for, in any case of letters; the default if it is not there.

        Raises:
            ArgumentError: if the word is not known.
        """
        value = self.value(key)
        if value is None:
            return default
        words = {word.lower(): meaning for word, meaning in known.items()}
        if (word := str(value).lower()) not in words:
            names = ", ".join(known)
            raise ArgumentError(f"{self.name}: {key} {value} is not priced here; what is: {names}{near(word, words)}")
        return words[word]

    def precision(self, bf16: str, fp16: str) -> str:
        """By two switches, of which one or none is on: `TrainingConfig.precision`.

        Raises:
            ArgumentError: if both are on.
        """
        on = [name for name, key in (("bf16", bf16), ("fp16", fp16)) if self.truth(key)]
        if len(on) == 2:
            raise ArgumentError(f"{self.name}: {bf16} and {fp16} are both on; leave one out")
        return on[0] if on else "fp32"

    def ignored(self, *keys: str) -> None:
        """Keys that are known, and change nothing that is priced."""
        self._asked.update(map(_normal, keys))

    def unread(self) -> tuple[str, ...]:
        """Keys that nobody has asked for.

        Raises:
            ArgumentError: if one of them looks like one that was, or if nothing that was asked for is there.
        """
        rest = tuple(key for key in self._values if key not in self._asked)
        for key in rest:
            for alike in difflib.get_close_matches(key, self._asked, 1, MISSPELT):
                raise ArgumentError(f"{self.name}: {key} is not known; did you mean {alike}?")
        if len(rest) == len(self._values):
            raise ArgumentError(f"{self.name} has no option that is known; some that are: {', '.join(self._some())}")
        return rest

    def _some(self) -> list[str]:
        return sorted(self._asked)[:6]


def _normal(key: str) -> str:
    return key.replace("-", "_")


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
