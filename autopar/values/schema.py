"""How is what a file says checked? By the type that it is to be: a frozen dataclass a table, marked `of_file`.

Nothing is converted that is not written so: a text is no number, 1 is no truth. What is unknown or missing, not finite,
too long or too deep is refused with its path in the file, what was found there, and what was expected. Nothing that a
file names is imported or called. `json_schema` is the same types, for other programs.
"""

import json
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config

from autopar.errors import AutoparError

Value = TypeVar("Value")

of_file = with_config(
    ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, json_schema_serialization_defaults_required=True)
)
"""Marks a dataclass as a table of a file: it has these keys, of these types, and no others."""

MAX_NBYTES = 1 << 25
"""The longest file that is read where its reader says no other: ten times the plan of a model of 100 layers."""

SHOWN = 100
"""Faults of which the places are told apart; a file of more is wrong altogether."""

Count = Annotated[int, Field(ge=1, le=1 << 40)]
Index = Annotated[int, Field(ge=0, le=1 << 40)]
Word = Annotated[str, Field(max_length=1 << 12, pattern=r"^[^\x00-\x1f\x7f-\x9f]*$")]
"""A short text on one line; what is printed of a file does not steer the terminal."""


def file_text(path: str | Path, error: type[AutoparError], remedy: str, most: int = MAX_NBYTES) -> str:
    """What a file says. most: bytes that are read.

    Raises:
        AutoparError: of the type given, if it is no file (but a pipe, a device), cannot be read or is too long.
    """
    try:
        status = Path(path).stat()
        if not stat.S_ISREG(status.st_mode):
            raise error(f"{path} cannot be read: it is no file; {remedy}")
        if status.st_size > most:
            raise error(f"{path} cannot be read: it has {status.st_size} bytes, more than {most}; {remedy}")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as found:
        if isinstance(found, AutoparError):
            raise
        raise error(f"{path} cannot be read ({found}); {remedy}") from found


def json_value(text: str, where: str, error: type[AutoparError], remedy: str) -> Any:
    """The value that a JSON text is; where: what is read.

    Raises:
        AutoparError: of the type given, if it is none: also where it says NaN, one key twice, or control characters.
    """
    try:
        value = json.loads(text, parse_constant=_not_finite, object_pairs_hook=_once)
        check_texts(value)
        return value
    except (ValueError, RecursionError) as found:
        what = "it is nested too deep" if isinstance(found, RecursionError) else str(found)
        raise error(f"{where}: this is no JSON that is read here: {what}; {remedy}") from found


def check_texts(value: Any) -> None:
    """Raises ValueError if a key of a JSON or TOML value, or a text in it, would steer the terminal that it is printed
    on: keys are printable, texts but for ends of lines and tabs."""
    stack = [value]
    while stack:
        match stack.pop():
            case str() as text if not text.isprintable():
                if any(not (c.isprintable() or c in "\n\t") for c in text):
                    raise ValueError(f"a text has control characters: {ascii(text)[:60]}")
            case dict() as table:
                if (key := next((key for key in table if not key.isprintable()), None)) is not None:
                    raise ValueError(f"a key has control characters: {ascii(key)[:60]}")
                stack.extend(table.values())
            case list() as items:
                stack.extend(items)


def _not_finite(word: str) -> None:
    raise ValueError(f"{word} is no number of JSON")


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {ascii(twice)[:60]} stands twice in one object")
    return found


def checked(
    kind: type[Value], value: Any, where: str, error: type[AutoparError], remedy: str, *, partial: bool = False
) -> Value:
    """`value`, of JSON or TOML, as a value of the dataclass `kind`.

    Args:
        where: what is read, in front of the path of what is wrong.
        error: raised with where, what was found and expected, and `remedy`.
        partial: what has a default may be missing.

    Raises:
        AutoparError: of the type given.
    """
    try:
        found: Value = _adapter(cast(Any, kind)).validate_json(json.dumps(value))
    except ValidationError as wrong:
        raise error(f"{where}: {_said(wrong, value)}; {remedy}") from wrong
    except (RecursionError, TypeError, ValueError) as wrong:  # of TOML, whose dates no table has
        what = "it is nested too deep" if isinstance(wrong, RecursionError) else str(wrong)
        raise error(f"{where}: {what}; {remedy}") from wrong
    if not partial and (missing := next(_missing(found, value, ""), None)) is not None:
        raise error(f"{where}: {missing[1:]}: missing; {remedy}")
    return found


def _missing(found: Any, value: Any, path: str) -> Iterator[str]:
    """Paths of keys that a table took by default."""
    if is_dataclass(found):
        for field in fields(found):
            own = f"{path}.{field.name}"
            if field.name not in value:
                yield own
            else:
                yield from _missing(getattr(found, field.name), value[field.name], own)
    elif isinstance(found, tuple):
        for i, (one, part) in enumerate(zip(found, value, strict=True)):
            yield from _missing(one, part, f"{path}[{i}]")
    elif isinstance(found, dict):
        for key, one in found.items():
            yield from _missing(one, value[key], f"{path}.{key}")


def json_schema(kind: type[Any], *, partial: bool = False) -> dict[str, Any]:
    """The JSON schema of a file of that kind; partial: as of `checked`."""
    return _adapter(cast(Any, kind)).json_schema(mode="validation" if partial else "serialization")


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def _said(wrong: ValidationError, whole: Any) -> str:
    """The first fault of a value: where, what is expected there, and what was found."""
    faults = [
        (_path(fault["loc"], whole, is_key=fault["type"] in _KEYS), fault)
        for fault in wrong.errors(include_url=False, include_context=False)[:SHOWN]
    ]
    path, first = max((one for one in faults if one[0].startswith(faults[0][0])), key=lambda one: len(one[0]))
    others = max(len({other for other, _ in faults}), wrong.error_count() - SHOWN) - 1
    more = f" (and {others} more)" if others else ""
    if first["type"] in _KEYS:
        return f"{path}: {_KEYS[first['type']]}{more}"
    said = {
        fault["msg"].removeprefix("Input should be ").removeprefix("Value error, ") for p, fault in faults if p == path
    }
    expected = "" if first["type"] == "value_error" else "expected "
    return f"{path}: {expected}{' or '.join(sorted(said))}, found {_short(first['input'])}{more}"


_KEYS = {"missing": "missing", "unexpected_keyword_argument": "unknown key"}


def _path(places: tuple[int | str, ...], whole: Any, *, is_key: bool) -> str:
    """`levels[0].alpha`: places without those that name one of several types that a value may be.

    is_key: the last place is a key, whether it is there or not.
    """
    path = ""
    for number, place in enumerate(places):
        if isinstance(whole, list) and isinstance(place, int):
            path, whole = f"{path}[{place}]", whole[place] if place < len(whole) else None
        elif isinstance(whole, dict) and (place in whole or (is_key and number == len(places) - 1)):
            path, whole = f"{path}.{place}" if path else str(place), whole.get(place)
    return path


def _short(value: Any) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "an integer of many digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
