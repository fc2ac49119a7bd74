"""Which files make a checkpoint, and of what run is it? Its manifest says, written last: without one it does not count.

Reading one executes nothing and believes nothing: keys, types, sizes and file names are checked, and so is the
manifest's own checksum, the SHA-256 of its other entries as sorted compact JSON.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from autopar.errors import CheckpointError
from autopar.values.schema import Count, Word, checked, json_value, of_file

MANIFEST = "manifest.json"
REMEDY = "give a checkpoint as autopar.runtime.save wrote it"
MAX_STEP = 1 << 40

Size = Annotated[int, Field(ge=0, le=1 << 50)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,119}[A-Za-z0-9_-]$")]
"""Of a file beside the manifest: no folder, and neither `.` nor `..`."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFile:
    """Size and SHA-256 of a file."""

    nbytes: Size
    sha256: Sha256


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint is.

    step: the number its run gave it. model, fingerprint: of the plan. world: how many ranks wrote it.
    holds: what can be loaded besides the module: optimizer, scheduler, data. files: all of the folder's, by name.
    checksum: of all other entries; `sealed` writes it.
    """

    format: Literal[1] = 1
    step: Annotated[int, Field(ge=0, le=MAX_STEP)]
    model: Word
    fingerprint: Word
    world: Count
    torch: Word
    autopar: Word
    holds: tuple[Word, ...]
    files: Mapping[FileName, StoredFile]
    checksum: str = ""

    def to_json(self) -> str:
        """The manifest's text, with its checksum."""
        body = asdict(self)
        return json.dumps({**body, "checksum": checksum_of(body)}, indent=1, sort_keys=True) + "\n"


def checksum_of(body: Mapping[str, Any]) -> str:
    """Of a manifest's entries but the checksum."""
    rest = {name: value for name, value in body.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def manifest_from(text: str) -> Manifest:
    """The manifest that `to_json` wrote.

    Raises:
        CheckpointError: if the text is anything else.
    """
    found = checked(Manifest, json_value(text, MANIFEST, CheckpointError, REMEDY), MANIFEST, CheckpointError, REMEDY)
    if MANIFEST in found.files:
        raise CheckpointError(f"{MANIFEST}: files: it lists itself; {REMEDY}")
    if found.world > len(found.files):
        raise CheckpointError(f"{MANIFEST}: world: {found.world} ranks wrote {len(found.files)} files; {REMEDY}")
    if found.checksum != checksum_of(asdict(found)):
        raise CheckpointError(f"{MANIFEST}: checksum: it is not that of the other entries; {REMEDY}")
    return found
