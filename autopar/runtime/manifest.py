"""Which files make a checkpoint, and of what run is it? Its manifest says, written last: without one it does not count.

Reading one executes nothing, and believes nothing: keys, types, sizes and file names are checked, and so is the
manifest's own checksum, the SHA-256 of its other entries as sorted compact JSON.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

from autopar.errors import CheckpointError

MANIFEST = "manifest.json"
FORMAT = 1
MAX_NBYTES = 2**26
"""Of a manifest: that of 100,000 ranks has some 30 MB."""
MAX_NUMBER = 10**18 - 1
MAX_TEXT = 1000

_NAME = re.compile(r"(?!\.{1,2}$)[A-Za-z0-9_.-]{1,120}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Size and SHA-256 of a file."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    step: the number its run gave it. model, fingerprint: of the plan. world: how many ranks wrote it.
    holds: what can be loaded besides the module: optimizer, scheduler, data. files: all of the folder's, by name.
    """

    step: int
    model: str
    fingerprint: str
    world: int
    torch: str
    autopar: str
    holds: tuple[str, ...]
    files: Mapping[str, StoredFile]

    def to_json(self) -> str:
        body = {"format": FORMAT, **asdict(self), "files": {name: asdict(file) for name, file in self.files.items()}}
        body["holds"] = list(self.holds)
        return json.dumps({**body, "checksum": checksum_of(body)}, indent=1, sort_keys=True) + "\n"


def checksum_of(body: Mapping[str, Any]) -> str:
    """Of a manifest's other entries."""
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_from(text: str) -> Manifest:
    """The manifest that `to_json` wrote.

    Raises:
        CheckpointError: if the text is anything else.
    """
    body = json_from(text, MAX_NBYTES)
    fields = {"format", "step", "model", "fingerprint", "world", "torch", "autopar", "holds", "files", "checksum"}
    entries = entries_of(body, "manifest", fields)
    if entries["format"] != FORMAT or type(entries["format"]) is not int:
        refuse("format", entries["format"], f"{FORMAT}; another version of autopar wrote it")
    checksum = entries.pop("checksum")
    files = {name: _stored_file(name, value) for name, value in entries_of(entries["files"], "files").items()}
    holds = entries["holds"]
    if type(holds) is not list or not all(type(kind) is str and len(kind) <= MAX_TEXT for kind in holds):
        refuse("holds", holds, "a list of texts")
    texts = {name: text_of(entries[name], name) for name in ("model", "fingerprint", "torch", "autopar")}
    step, world = number_of(entries["step"], "step"), number_of(entries["world"], "world", 1)
    if checksum != checksum_of(entries):
        refuse("checksum", checksum, f"{checksum_of(entries)}, that of the other entries")
    return Manifest(step=step, world=world, holds=tuple(holds), files=files, **texts)


def _stored_file(name: str, value: Any) -> StoredFile:
    if not _NAME.fullmatch(name) or name == MANIFEST:
        refuse("files", name, "names of files beside the manifest, without folders")
    entries = entries_of(value, f"files/{name}", {"nbytes", "sha256"})
    sha256 = entries["sha256"]
    if type(sha256) is not str or not _SHA256.fullmatch(sha256):
        refuse(f"files/{name}/sha256", sha256, "64 hexadecimal digits")
    return StoredFile(nbytes=number_of(entries["nbytes"], f"files/{name}/nbytes"), sha256=sha256)


def json_from(text: str, max_nbytes: int) -> Any:
    """Values of a JSON text without fractions, doubled keys or numbers that no size or count has.

    Raises:
        CheckpointError: if it is none.
    """
    if len(text) > max_nbytes:
        fail("the file", f"{len(text)} characters", f"at most {max_nbytes}")
    try:
        return json.loads(
            text,
            object_pairs_hook=_without_doubles,
            parse_float=_no_fraction,
            parse_constant=_no_fraction,
            parse_int=_int,
        )
    except RecursionError:
        fail("the file", "values inside values without end", "a manifest of autopar.runtime.save")
    except json.JSONDecodeError as error:
        raise CheckpointError(f"found no JSON ({error}), expected what autopar.runtime.save wrote") from error


def _without_doubles(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            fail(name, "it twice", "each name once")
        found[name] = value
    return found


def _no_fraction(text: str) -> NoReturn:
    fail("a number", text[:40], "whole numbers")


def _int(text: str) -> int:
    return int(text) if len(text) <= len(str(MAX_NUMBER)) + 1 else _no_fraction(text)


def entries_of(value: Any, path: str, names: set[str] | None = None) -> dict[str, Any]:
    """Entries of a JSON object, which has just these names."""
    if type(value) is not dict:
        refuse(path, value, "an object")
    if names is not None and set(value) != names:
        missing, unknown = sorted(names - set(value)), sorted(set(value) - names)
        fail(path, f"an object without {missing}, with unknown {unknown}", f"the keys {sorted(names)}")
    return dict(value)


def number_of(value: Any, path: str, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MAX_NUMBER:
        refuse(path, value, f"a number from {least} to {MAX_NUMBER}")
    return value


def numbers_of(value: Any, path: str) -> tuple[int, ...]:
    return tuple(number_of(one, path) for one in list_of(value, path))


def text_of(value: Any, path: str) -> str:
    if type(value) is not str or len(value) > MAX_TEXT:
        refuse(path, value, f"a text of at most {MAX_TEXT} characters")
    return value


def list_of(value: Any, path: str) -> list[Any]:
    if type(value) is not list:
        refuse(path, value, "a list")
    return value


def refuse(path: str, value: Any, expected: str) -> NoReturn:
    shown = repr(value)
    fail(path, shown if len(shown) < 200 else shown[:200] + "...", expected)


def fail(path: str, found: str, expected: str) -> NoReturn:
    raise CheckpointError(f"{path}: found {found}, expected {expected}")
