"""An exported plan as a folder that stands alone: plan.json, specs.json, state.pt (if needed), train.py, and the code:
model.py of one stage, stage_0.py, ... of several."""

import hashlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.export.source import generate
from autopar.export.training import training_script
from autopar.runtime.exported import SPECS, STATE
from autopar.runtime.groups import flattened_axes
from autopar.values.graph import CapturedModel, dtype_of, requires_grad
from autopar.values.local_model import LocalModel
from autopar.values.plan import Plan, decided
from autopar.values.specs_file import model_table, specs_text
from autopar.values.whole_file import whole_file, write_whole


def export_folder(
    folder: Path,
    captured: CapturedModel,
    locals_: Sequence[LocalModel],
    plan: Plan,
    values: Mapping[str, Tensor],
    examples: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write the folder; other files in it are left alone.

    Args:
        captured: the whole model.
        locals_: what the ranks of each stage run.
        values: parameters and buffers by placeholder; buffers on the meta device have to come from a checkpoint later.
        examples: inputs that the model was planned with, by path; train.py draws such as these.

    Raises:
        ArgumentError: if the folder cannot be written.
    """
    state = state_bytes(captured, values)
    body = {
        "plan": decided(plan),
        "state": hashlib.sha256(state).hexdigest() if state else None,
        "whole": model_table({**specs_of(captured), "constants": []}),
        "loss_dtype": str(dtype_of(captured.nodes[captured.loss])).removeprefix("torch."),
        "stages": [model_table({**specs(local), **_boundary(local.captured)}) for local in locals_],
    }
    files = {"plan.json": plan.to_json(), SPECS: specs_text(body)}
    names = file_names(plan)
    files |= {f"{name}.py": generate(local) for name, local in zip(names, locals_, strict=True)}
    files["train.py"] = training_script(captured, plan, names, examples)
    write_folder(folder, files, state)


def file_names(plan: Plan) -> tuple[str, ...]:
    """Of the code of each stage."""
    return ("model",) if plan.num_stages == 1 else tuple(f"stage_{number}" for number in range(plan.num_stages))


def _boundary(stage: CapturedModel) -> dict[str, Any]:
    """What a stage receives and sends, and which of what it receives has gradients."""
    return {
        "received": list(stage.received),
        "sends": list(stage.sends),
        "differentiable": [name for name in stage.received if requires_grad(stage.nodes[name])],
    }


def state_bytes(captured: CapturedModel, values: Mapping[str, Tensor]) -> bytes:
    """Constants and buffers that have values, as torch saves them; empty if there are none."""
    state = dict(captured.constants)
    state |= {b.placeholder: values[b.placeholder] for b in captured.buffers if b.placeholder in values}
    state = {name: value.detach().cpu().contiguous() for name, value in state.items() if not value.is_meta}
    written = io.BytesIO()
    if state:
        torch.save(state, written)
    return written.getvalue()


def write_folder(folder: Path, files: Mapping[str, str], state: bytes) -> None:
    """Write texts by file name, and state.pt where there is any state.

    Raises:
        ArgumentError: if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_whole(folder / name, text)
        (folder / STATE).unlink(missing_ok=True)
        if state:
            with whole_file(folder / STATE) as part:
                part.write_bytes(state)
    except OSError as error:
        raise ArgumentError(
            f"cannot export to {folder}: {error.strerror}; choose a folder that can be written"
        ) from error


def specs(local: LocalModel) -> dict[str, Any]:
    """What each tensor is, and which axes collectives use together."""
    axes = sorted(flattened_axes(local.graph, local.plan.mesh))
    return {**specs_of(local.captured), "axes": axes}


def specs_of(captured: CapturedModel) -> dict[str, Any]:
    """What each tensor of a model is."""
    return {
        "guards": [asdict(guard) for guard in captured.guards],
        "model": captured.name,
        "loss": captured.loss,
        "parameters": [_plain(asdict(spec)) for spec in captured.parameters],
        "buffers": [_plain(asdict(spec)) for spec in captured.buffers],
        "inputs": [_plain(asdict(spec)) for spec in captured.inputs],
        "constants": list(captured.constants),
        "accumulation": asdict(captured.accumulation) if captured.accumulation is not None else None,
    }


def _plain(body: dict[str, Any]) -> dict[str, Any]:
    return {k: str(v).removeprefix("torch.") if isinstance(v, torch.dtype) else v for k, v in body.items()}
