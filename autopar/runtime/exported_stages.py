"""How does an exported folder of stages train? Their `forward`s in place of the stages' graphs, in the same module.

Beside `plan.json` and `state.pt` the folder has a file of code a stage; specs.json says what each tensor is, of the
whole model and (`stages`) of each part.
"""

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx

from autopar.errors import PlanMismatchError
from autopar.runtime.evaluation import evaluation_graph
from autopar.runtime.exported import (
    STATE,
    Initial,
    Values,
    call_graph,
    captured_from,
    read_specs,
    source_hash,
    trace_exported,
)
from autopar.runtime.pipeline import Code, PipelinedModule
from autopar.values.graph import LocalModel
from autopar.values.staged_plan import load_staged_plan


def load_exported_stages(
    folder: str | Path, forwards: Sequence[Callable[..., Any]], initial: Initial, *, seed: int | None = None
) -> PipelinedModule:
    """The distributed module of an exported folder of stages; all ranks call this together, after `init`.

    Args:
        folder: where plan.json, specs.json and, if any, state.pt lie.
        forwards: of the folder's stage files, in order.
        initial: values to start from; rank 0's count.
        seed: of random numbers; None for that of rank 0's torch generator.

    Raises:
        PlanMismatchError: if a file is missing, of another library version, or not of these stages.
        MeshError, RankError: as `PipelinedModule`.
    """
    root = Path(folder)
    plan, specs = load_staged_plan(root / "plan.json"), read_specs(root)
    parts = specs.get("stages", ())
    if not len(parts) == len(forwards) == plan.num_stages:
        raise PlanMismatchError(
            f"{root} has a plan of {plan.num_stages} stages and specs of {len(parts)}, {len(forwards)} forwards were "
            "given; give one of each stage file, or export the model again"
        )
    held = torch.load(root / STATE, weights_only=True) if (root / STATE).exists() else {}
    stages = [
        captured_from(part, {name: held[name] for name in part["constants"]}, forward)
        for part, forward in zip(parts, forwards, strict=True)
    ]
    codes = hashlib.sha256("".join(map(source_hash, forwards)).encode()).hexdigest()[:16]
    captured = captured_from(specs, {}, codes)
    values = Values(captured, held, initial)

    def local(number: int) -> LocalModel:
        axes = tuple(tuple(names) for names in parts[number]["axes"])
        graph = call_graph(stages[number], plan.stages[number], forwards[number], axes)
        return LocalModel(captured=stages[number], plan=plan.stages[number], graph=graph)

    code = Code(local=local, written=_written, loss_dtype=getattr(torch, specs["loss_dtype"]))
    return PipelinedModule(captured, stages, plan, values, seed=seed, code=code)


def _written(local: LocalModel, training: bool) -> fx.Graph:
    traced = trace_exported(local, keep_again=training)
    return traced if training else evaluation_graph(traced)
