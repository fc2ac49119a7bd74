"""Where in a checkpoint is each piece of each tensor? A JSON file says, for torch's own index is a pickle.

Torch writes and reads pieces (`torch.distributed.checkpoint`); what it wrote into its pickle `.metadata` rank 0 writes
here too, and loading makes torch's values of this. `.metadata` is for torch's own tools; nothing here reads it.
"""

import json
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autopar.runtime.manifest import (
    StoredFile,
    entries_of,
    fail,
    json_from,
    list_of,
    number_of,
    numbers_of,
    refuse,
    text_of,
)
from autopar.runtime.private_torch import storage_of, stored_at

INDEX = "tensors.json"
MAX_NBYTES = 2**31
"""Of an index: a tensor takes some 200 bytes a piece."""


def index_text(metadata: Metadata) -> str:
    """The index of what torch wrote."""
    places = {(index.fqn, index.offset): place for index, place in metadata.storage_data.items()}
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            values[name] = _place(places[name, None])
            continue
        pieces = [
            {"offsets": list(c.offsets), "shape": list(c.sizes), **_place(places[name, c.offsets])}
            for c in stored.chunks
        ]
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(stored.size), "pieces": pieces}
    return json.dumps({"tensors": tensors, "values": values}, separators=(",", ":"))


def _place(stored: Any) -> dict[str, Any]:
    file, start, nbytes = storage_of(stored)
    return {"file": file, "start": start, "nbytes": nbytes}


def index_from(text: str, files: Mapping[str, StoredFile]) -> Metadata:
    """Torch's values of an index whose pieces lie in `files`.

    Raises:
        CheckpointError: if the text is no index, a piece lies outside of its file, or a tensor lacks a part.
    """
    entries = entries_of(json_from(text, MAX_NBYTES), "index", {"tensors", "values"})
    stored: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    for name, value in entries_of(entries["values"], "values").items():
        stored[name] = BytesStorageMetadata()
        places[MetadataIndex(name)] = _place_from(entries_of(value, name, {"file", "start", "nbytes"}), name, files)
    for name, value in entries_of(entries["tensors"], "tensors").items():
        if name in stored:
            fail(name, "a tensor and a value", "one of them")
        stored[name] = _tensor(name, entries_of(value, name, {"dtype", "shape", "pieces"}), places, files)
    return Metadata(state_dict_metadata=stored, storage_data=places)


def _tensor(
    name: str, entries: dict[str, Any], places: dict[MetadataIndex, Any], files: Mapping[str, StoredFile]
) -> TensorStorageMetadata:
    dtype = getattr(torch, text_of(entries["dtype"], name), None)
    if not isinstance(dtype, torch.dtype):
        refuse(name, entries["dtype"], "a dtype of torch")
    shape, chunks, count = numbers_of(entries["shape"], name), [], 0
    for value in list_of(entries["pieces"], name):
        piece = entries_of(value, name, {"offsets", "shape", "file", "start", "nbytes"})
        offsets, sizes = numbers_of(piece["offsets"], name), numbers_of(piece["shape"], name)
        ranks = {len(shape), len(offsets), len(sizes)}
        if len(ranks) > 1 or any(a + n > whole for a, n, whole in zip(offsets, sizes, shape, strict=True)):
            fail(name, f"a piece {sizes} at {offsets}", f"one inside {shape}")
        index = MetadataIndex(name, offsets)
        if index in places:
            fail(name, f"two pieces at {offsets}", "one")
        places[index] = _place_from(piece, name, files)
        chunks.append(ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes)))
        count += prod(sizes)
    if count != prod(shape):
        fail(name, f"pieces of {count} elements", f"{prod(shape)}, for its shape is {shape}")
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=torch.Size(shape), chunks=chunks)


def _place_from(entries: dict[str, Any], name: str, files: Mapping[str, StoredFile]) -> Any:
    file = text_of(entries["file"], name)
    if file not in files:
        fail(name, f"a piece in {file}", "one of the files of the manifest")
    start, nbytes = number_of(entries["start"], name), number_of(entries["nbytes"], name)
    if start + nbytes > files[file].nbytes:
        fail(name, f"a piece that ends at {start + nbytes} of {file}", f"one within {files[file].nbytes} bytes")
    return stored_at(file, start, nbytes)
