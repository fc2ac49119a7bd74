"""An exported plan with stages as a folder: plan.json, stage_0.py, ..., specs.json, state.pt (if needed), train.py."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from autopar.export.folder import specs, specs_of, write_folder
from autopar.export.source import generate
from autopar.export.training import staged_training_script
from autopar.lower.emit import emit_stage
from autopar.runtime.exported import SPECS
from autopar.values.graph import CapturedModel, dtype_of, requires_grad
from autopar.values.staged_plan import StagedPlan


def export_stages(
    folder: Path,
    captured: CapturedModel,
    stages: Sequence[CapturedModel],
    plan: StagedPlan,
    plan_json: str,
    values: Mapping[str, Tensor],
) -> None:
    """Write the folder; other files in it are left alone.

    Args:
        captured: the whole model; stages: its parts.
        plan_json: the plan as text.
        values: parameters and buffers by placeholder; buffers on the meta device have to come from a checkpoint later.

    Raises:
        ArgumentError: if the folder cannot be written.
    """
    locals_ = [emit_stage(stages, plan.stages, number) for number in range(plan.num_stages)]
    body: dict[str, Any] = specs_of(captured)
    body["constants"] = []
    body["loss_dtype"] = str(dtype_of(captured.nodes[captured.loss])).removeprefix("torch.")
    body["stages"] = [{**specs(local), **_boundary(local.captured)} for local in locals_]
    files = {"plan.json": plan_json, SPECS: json.dumps(body, indent=1)}
    files |= {f"stage_{number}.py": generate(local) for number, local in enumerate(locals_)}
    files["train.py"] = staged_training_script(captured, plan)
    write_folder(folder, files, captured, values)


def _boundary(stage: CapturedModel) -> dict[str, Any]:
    """What a stage receives and sends, and which of what it receives has gradients."""
    return {
        "received": list(stage.received),
        "sends": list(stage.sends),
        "differentiable": [name for name in stage.received if requires_grad(stage.nodes[name])],
    }
