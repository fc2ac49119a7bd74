"""What does an exported folder's specs.json say? What each tensor of the model and of each stage is.

Written by `export.folder`, read by `runtime.exported`. It names tensors and code, and none of it is imported or called.
Its `digest` is of all the rest: a name or a size that changed by accident would train another model.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from autopar.errors import PlanFileError
from autopar.values.graph import Accumulation, BufferSpec, InputSpec, ParameterSpec
from autopar.values.guards import BufferGuard
from autopar.values.precision import dtype_named
from autopar.values.schema import Word, checked, file_text, json_value, of_file

REMEDY = "export the model again"

Shape = tuple[Annotated[int, Field(ge=0, le=1 << 40)], ...]
Name = Annotated[str, Field(pattern=r"^[^\W\d]\w*$", max_length=1 << 12)]
"""Of a placeholder, which is a name in Python."""


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterTable:
    """A `ParameterSpec`."""

    placeholder: Name
    names: Annotated[tuple[Word, ...], Field(min_length=1)]
    shape: Shape
    dtype: Word
    trainable: bool
    stored: Word | None
    mutated_by: Word | None

    def spec(self, where: str) -> ParameterSpec:
        stored = None if self.stored is None else dtype_named(self.stored, f"{where}.stored")
        return ParameterSpec(**_typed(self, where), trainable=self.trainable, stored=stored)


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class BufferTable:
    """A `BufferSpec`."""

    placeholder: Name
    names: Annotated[tuple[Word, ...], Field(min_length=1)]
    shape: Shape
    dtype: Word
    persistent: bool
    mutated_by: Word | None

    def spec(self, where: str) -> BufferSpec:
        return BufferSpec(**_typed(self, where), persistent=self.persistent)


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class InputTable:
    """An `InputSpec`."""

    placeholder: Name
    path: Word
    shape: Shape
    dtype: Word

    def spec(self, where: str) -> InputSpec:
        shape, dtype = _shape(self.shape, where), dtype_named(self.dtype, f"{where}.dtype")
        return InputSpec(placeholder=self.placeholder, path=self.path, shape=shape, dtype=dtype)


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTable:
    """What a whole model's tensors are, or a stage's."""

    model: Word
    loss: Word
    parameters: tuple[ParameterTable, ...]
    buffers: tuple[BufferTable, ...]
    inputs: tuple[InputTable, ...]
    constants: tuple[Name, ...]
    accumulation: Accumulation | None
    guards: tuple[BufferGuard, ...]
    received: tuple[Word, ...]
    sends: tuple[Word, ...]
    differentiable: tuple[Word, ...]
    axes: tuple[tuple[Word, ...], ...]


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class SpecsFile:
    """specs.json: the whole model, and each of its stages.

    plan: digest of what the plan decides, for which the code is written. state: of state.pt, if there is one.
    """

    digest: Word
    plan: Word
    state: Word | None
    whole: ModelTable
    loss_dtype: Word
    stages: tuple[ModelTable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Specs:
    """What the tensors of a model or a stage are."""

    table: ModelTable
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[InputSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedSpecs:
    """Of the whole model and of its stages; the dtype of the loss; digests of the plan and of state.pt."""

    whole: Specs
    stages: tuple[Specs, ...]
    loss_dtype: torch.dtype
    plan: str
    state: str | None


def load_specs(path: Path) -> SavedSpecs:
    """What a specs.json says.

    Raises:
        PlanFileError: if it cannot be read, or says something else.
    """
    where = str(path)
    body = json_value(file_text(path, PlanFileError, REMEDY), where, PlanFileError, REMEDY)
    file = checked(SpecsFile, body, where, PlanFileError, REMEDY)
    if file.digest != _digest({key: value for key, value in body.items() if key != "digest"}):
        raise PlanFileError(f"{where} is not as it was written: its digest is another; {REMEDY}")
    try:
        return SavedSpecs(
            whole=_specs(file.whole, "whole"),
            stages=tuple(_specs(stage, f"stages[{i}]") for i, stage in enumerate(file.stages)),
            loss_dtype=dtype_named(file.loss_dtype, "loss_dtype"),
            plan=file.plan,
            state=file.state,
        )
    except PlanFileError as error:
        raise PlanFileError(f"{where}: {error}; {REMEDY}") from error


def specs_text(body: Mapping[str, Any]) -> str:
    """The text of a specs.json that says `body`, with its digest."""
    return json.dumps({"digest": _digest(body), **body}, indent=1)


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def model_table(body: Mapping[str, Any]) -> dict[str, Any]:
    """The table of what `body` says, and of what it does not that there is nothing."""
    nothing: dict[str, Any] = {"guards": [], "received": [], "sends": [], "differentiable": [], "axes": []}
    return {**nothing, **body}


def _specs(table: ModelTable, where: str) -> Specs:
    tables: list[ParameterTable | BufferTable | InputTable] = [*table.parameters, *table.buffers, *table.inputs]
    names = [*(one.placeholder for one in tables), *table.constants]
    if len(set(names)) < len(names):
        twice = Counter(names).most_common(1)[0][0]
        raise PlanFileError(f"{where}: {twice!r} stands for two tensors")
    return Specs(
        table=table,
        parameters=tuple(one.spec(f"{where}.parameters[{i}]") for i, one in enumerate(table.parameters)),
        buffers=tuple(one.spec(f"{where}.buffers[{i}]") for i, one in enumerate(table.buffers)),
        inputs=tuple(one.spec(f"{where}.inputs[{i}]") for i, one in enumerate(table.inputs)),
    )


def _typed(table: ParameterTable | BufferTable, where: str) -> dict[str, Any]:
    return {
        "placeholder": table.placeholder,
        "names": table.names,
        "shape": _shape(table.shape, where),
        "dtype": dtype_named(table.dtype, f"{where}.dtype"),
        "mutated_by": table.mutated_by,
    }


def _shape(shape: tuple[int, ...], where: str) -> tuple[int, ...]:
    if math.prod(size for size in shape if size) >= 1 << 55:
        raise PlanFileError(f"{where}.shape: {shape} is larger than any tensor")
    return shape
