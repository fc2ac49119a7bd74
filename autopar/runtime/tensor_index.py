"""Where in a checkpoint is each piece of each tensor? A JSON file says, for torch's own index is a pickle.

Torch writes and reads pieces (`torch.distributed.checkpoint`); what it wrote into its pickle `.metadata` rank 0 writes
here too, and loading makes torch's values of this. `.metadata` is for torch's own tools; nothing here reads it.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Annotated, Any

import torch
from pydantic import Field
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from autopar.errors import CheckpointError
from autopar.runtime.manifest import REMEDY, FileName, Size, StoredFile
from autopar.runtime.private_torch import storage_of, stored_at
from autopar.values.schema import Word, checked, json_value, of_file

INDEX = "tensors.json"

Sizes = Annotated[tuple[Size, ...], Field(max_length=64)]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """A part of a file."""

    file: FileName
    start: Size
    nbytes: Size


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredPiece:
    """A block of a tensor, and the part of a file that holds it."""

    offsets: Sizes
    shape: Sizes
    at: StoredBytes


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A tensor in pieces that together are the whole."""

    dtype: Word
    shape: Sizes
    pieces: tuple[StoredPiece, ...]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class TensorIndex:
    """Tensors, and values that are no tensors, by name."""

    tensors: Mapping[str, StoredTensor]
    values: Mapping[str, StoredBytes]


def index_text(metadata: Metadata) -> str:
    """The index of what torch wrote."""
    places = {(index.fqn, index.offset): _bytes(place) for index, place in metadata.storage_data.items()}
    tensors, values = {}, {}
    for name, stored in metadata.state_dict_metadata.items():
        if isinstance(stored, BytesStorageMetadata):
            values[name] = places[name, None]
            continue
        pieces = tuple(
            StoredPiece(offsets=tuple(c.offsets), shape=tuple(c.sizes), at=places[name, c.offsets])
            for c in stored.chunks
        )
        dtype = str(stored.properties.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(dtype=dtype, shape=tuple(stored.size), pieces=pieces)
    return json.dumps(asdict(TensorIndex(tensors=tensors, values=values)), separators=(",", ":"))


def _bytes(stored: Any) -> StoredBytes:
    file, start, nbytes = storage_of(stored)
    return StoredBytes(file=file, start=start, nbytes=nbytes)


def index_from(text: str, files: Mapping[str, StoredFile]) -> Metadata:
    """Torch's values of an index whose pieces lie in `files`.

    Raises:
        CheckpointError: if the text is no index, a piece lies outside of its file, or a tensor lacks a part.
    """
    index = checked(TensorIndex, json_value(text, INDEX, CheckpointError, REMEDY), INDEX, CheckpointError, REMEDY)
    if both := index.tensors.keys() & index.values.keys():
        raise _wrong(min(both), "is a tensor and a value")
    stored: dict[str, Any] = {name: BytesStorageMetadata() for name in index.values}
    places = {MetadataIndex(name): _place(name, at, files) for name, at in index.values.items()}
    for name, tensor in index.tensors.items():
        stored[name] = _metadata(name, tensor)
        places |= {MetadataIndex(name, p.offsets): _place(name, p.at, files) for p in tensor.pieces}
    return Metadata(state_dict_metadata=stored, storage_data=places)


def _metadata(name: str, tensor: StoredTensor) -> TensorStorageMetadata:
    dtype = getattr(torch, tensor.dtype, None)
    if not isinstance(dtype, torch.dtype):
        raise _wrong(name, f"has dtype {tensor.dtype!r}, which torch has not")
    for piece in tensor.pieces:
        alike = len(piece.offsets) == len(piece.shape) == len(tensor.shape)
        if not alike or any(a + n > all_ for a, n, all_ in zip(piece.offsets, piece.shape, tensor.shape, strict=True)):
            raise _wrong(name, f"has a piece {piece.shape} at {piece.offsets}, outside of its shape {tensor.shape}")
    if len({piece.offsets for piece in tensor.pieces}) < len(tensor.pieces):
        raise _wrong(name, "has two pieces at one place")
    if (count := sum(prod(piece.shape) for piece in tensor.pieces)) != prod(tensor.shape):
        raise _wrong(name, f"has pieces of {count} elements, and {prod(tensor.shape)} of its shape {tensor.shape}")
    chunks = [ChunkStorageMetadata(offsets=torch.Size(p.offsets), sizes=torch.Size(p.shape)) for p in tensor.pieces]
    return TensorStorageMetadata(properties=TensorProperties(dtype=dtype), size=torch.Size(tensor.shape), chunks=chunks)


def _place(name: str, at: StoredBytes, files: Mapping[str, StoredFile]) -> Any:
    if at.file not in files:
        raise _wrong(name, f"is in {at.file}, which the manifest does not list")
    if at.start + at.nbytes > files[at.file].nbytes:
        raise _wrong(name, f"ends at byte {at.start + at.nbytes} of {at.file}, which has {files[at.file].nbytes}")
    return stored_at(at.file, at.start, at.nbytes)


def _wrong(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{INDEX}: {name} {what}; {REMEDY}")
