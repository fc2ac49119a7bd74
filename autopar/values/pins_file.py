"""How is a file of pins read? TOML or JSON, of the same tables; its types are its schema.

forbid = ["sequence parallel"]

[pins]
"*.attn.*" = { model = "heads" }
"*embed*" = "replicate"
"model.layers.0-3" = { recompute = false }
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from autopar.errors import PinError
from autopar.values.pins import DEMAND, FORBID, MAX_LINES, Pins, pins_of
from autopar.values.schema import Word, check_texts, checked, file_text, json_value, of_file

REMEDY = 'write [pins] and lines such as "*.attn.*" = { model = "heads" }'
MAX_PINS = 1 << 20
"""Bytes of the longest file."""

Words = Word | Annotated[tuple[Word, ...], Field(min_length=1, max_length=64)]
Sayings = Annotated[Mapping[Word, bool | Words], Field(min_length=1, max_length=64)]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class PinsFile:
    """Pins as they stand in a file: patterns to a word, several of which one holds, or these by mesh axis."""

    pins: Annotated[Mapping[Word, Words | Sayings], Field(max_length=MAX_LINES)] = field(default_factory=dict)
    forbid: tuple[Word, ...] = ()
    demand: tuple[Word, ...] = ()


def load_pins(path: str | Path) -> Pins:
    """What a file of pins says. Nothing that it names is imported or called.

    Raises:
        PinError: if it cannot be read, or is none.
    """
    text = file_text(path, PinError, REMEDY, MAX_PINS)
    is_json = str(path).endswith(".json")
    body = json_value(text, str(path), PinError, REMEDY) if is_json else _toml(text, str(path))
    file = checked(PinsFile, body, str(path), PinError, REMEDY, partial=True)
    if FORBID in file.pins or DEMAND in file.pins:
        raise PinError(f"{path}: {FORBID} and {DEMAND} are lists of their own beside [pins]; {REMEDY}")
    return pins_of({**file.pins, FORBID: file.forbid, DEMAND: file.demand})


def _toml(text: str, where: str) -> Any:
    try:
        body = tomllib.loads(text)
        check_texts(body)
        return body
    except (ValueError, RecursionError) as error:
        what = "it is nested too deep" if isinstance(error, RecursionError) else str(error)
        raise PinError(f"{where}: this is no TOML that is read here: {what}; {REMEDY}") from error
