"""A checkpoint's manifest and index as formats that are fuzzed (`fuzzed_formats`): what is right of a mutant?

Of a manifest, that no two have one checksum, and no file of it is elsewhere; also of one that was given the right
checksum after it was changed, as by somebody who wants it loaded. Of an index, that pieces lie inside.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from autopar.errors import CheckpointError
from autopar.runtime.manifest import MANIFEST, REMEDY, Manifest, StoredFile, checksum_of, manifest_from
from autopar.runtime.tensor_index import index_from
from autopar.values.schema import file_text

Format = tuple[Any, Callable[[Any], str], Callable[[Path], str]]
"""A valid file, what writes it, and what says what one is."""


def a_manifest() -> Manifest:
    names = (
        "tensors.json",
        "run.pt",
        "__0_0.distcp",
        "__1_0.distcp",
        "random-00000.pt",
        "random-00001.pt",
        ".metadata",
    )
    files = {name: StoredFile(nbytes=100 + i, sha256=f"{i:064x}") for i, name in enumerate(names)}
    version = str(torch.__version__)
    kinds = {"model": "m", "fingerprint": "0123abcd", "torch": version, "autopar": "0.1.0"}
    return Manifest(step=120, world=2, holds=("optimizer",), files=files, **kinds)


def an_index() -> dict[str, Any]:
    def piece(offset: int, file: int) -> dict[str, Any]:
        at = {"file": f"__{file}_0.distcp", "start": 10, "nbytes": 40}
        return {"offsets": [offset, 0], "shape": [2, 3], "at": at}

    tensors = {"model.w": {"dtype": "float32", "shape": [4, 3], "pieces": [piece(0, 0), piece(2, 1)]}}
    values = {"optimizer.param_groups.w.lr": {"file": "__0_0.distcp", "start": 50, "nbytes": 20}}
    return {"tensors": tensors, "values": values}


def sealed(body: Any) -> str:
    """With the right checksum, where something else was changed."""
    is_table = isinstance(body, dict) and body.get("checksum") == json.loads(a_manifest().to_json())["checksum"]
    return json.dumps({**body, "checksum": checksum_of(body)} if is_table else body)


def manifest(write: Callable[[Any], str] = json.dumps) -> Format:
    def answer(path: Path) -> str:
        found, first = manifest_from(file_text(path, CheckpointError, REMEDY)), manifest_from(a_manifest().to_json())
        bad = [n for n in found.files if n in (".", "..", "", MANIFEST) or any(c in n for c in "/\\\x00\n")]
        assert not bad, f"files {bad}"
        assert found == first or found.checksum != first.checksum, "another manifest under the same checksum"
        assert manifest_from(found.to_json()) == found
        return "right"

    return json.loads(a_manifest().to_json()), write, answer


def index() -> Format:
    files = a_manifest().files

    def answer(path: Path) -> str:
        found = index_from(file_text(path, CheckpointError, REMEDY), files)
        for place in found.storage_data.values():
            assert place.offset + place.length <= files[place.relative_path].nbytes
        for name, stored in found.state_dict_metadata.items():
            for chunk in getattr(stored, "chunks", ()):
                inside = (a + n <= size for a, n, size in zip(chunk.offsets, chunk.sizes, stored.size, strict=True))
                assert all(inside), name
        return "right"

    return an_index(), json.dumps, answer


def sealed_manifest() -> Format:
    return manifest(sealed)
