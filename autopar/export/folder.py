"""An exported plan as a folder that stands alone: plan.json, model.py, specs.json, state.pt (if needed), train.py."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.errors import ArgumentError
from autopar.export.source import generate
from autopar.export.training import training_script
from autopar.runtime.exported import SPECS, STATE
from autopar.runtime.groups import flattened_axes
from autopar.values.graph import CapturedModel, LocalModel


def export_folder(folder: Path, local: LocalModel, plan_json: str, values: Mapping[str, Tensor]) -> None:
    """Write the folder; other files in it are left alone.

    Args:
        plan_json: the plan as text.
        values: parameters and buffers by placeholder; buffers on the meta device have to come from a checkpoint later.

    Raises:
        ArgumentError: if the folder cannot be written.
    """
    captured = local.captured
    files = {
        "plan.json": plan_json,
        "model.py": generate(local),
        SPECS: json.dumps(specs(local), indent=1),
        "train.py": training_script(local),
    }
    write_folder(folder, files, captured, values)


def write_folder(folder: Path, files: Mapping[str, str], captured: CapturedModel, values: Mapping[str, Tensor]) -> None:
    """Write texts by file name, and constants and buffers where there are any.

    Raises:
        ArgumentError: if the folder cannot be written.
    """
    state = dict(captured.constants)
    state |= {b.placeholder: values[b.placeholder] for b in captured.buffers if b.placeholder in values}
    state = {name: value.detach().cpu().contiguous() for name, value in state.items() if not value.is_meta}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
        (folder / STATE).unlink(missing_ok=True)
        if state:
            torch.save(state, folder / STATE)
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
    guards = {"guards": [asdict(guard) for guard in captured.guards]} if captured.guards else {}
    return {
        **guards,
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
