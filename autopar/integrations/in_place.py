"""How does a model that a framework holds become distributed, with the optimizer that was made before?

The model itself becomes the distributed module and keeps its class, so that a framework that asks for its configuration
or saves it finds what it knows. An optimizer that holds its old parameters is given the new ones.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.api.decorator import distribute_in_place
from autopar.api.distributed_tree import follow
from autopar.api.model_plan import load_plan
from autopar.errors import ArgumentError, OptimizerError
from autopar.integrations.whole_steps import called_in_whole_steps, runs_whole_steps
from autopar.runtime.checkpoint import distributed_in
from autopar.runtime.trainable import DECORATED, Trainable
from autopar.values.plan import Plan


def is_distributed(model: nn.Module) -> bool:
    return isinstance(vars(model).get(DECORATED, model), Trainable)


def as_plan(plan: Plan | str | Path) -> Plan:
    """A plan, read where a file is given.

    Raises:
        ArgumentError: for something else. PlanFileError, PlanMismatchError: as `autopar.load_plan`.
    """
    if isinstance(plan, str | Path):
        return load_plan(plan)
    if not isinstance(plan, Plan):
        raise ArgumentError(
            f"plan={plan!r}: give a plan from autopar.plan or autopar.load_plan, or the name of its file"
        )
    return plan


def distribute_with(
    model: nn.Module, plan: Plan, optimizers: Iterable[torch.optim.Optimizer], options: Mapping[str, Any]
) -> nn.Module:
    """Distribute `model` in place, and let `optimizers` have its new parameters; the model.

    Args:
        plan: of the model.
        optimizers: those made of the model's parameters before, without a step.
        options: keywords of `autopar.distribute`.

    Raises:
        OptimizerError: if one has state, or parameters that are not the model's.
        Everything that `autopar.distribute` raises.
    """
    before = dict(model.named_parameters(remove_duplicate=False))
    names = {id(parameter): name for name, parameter in before.items()}
    made = list(optimizers)
    for optimizer in made:
        _check_new(optimizer, names)
    distribute_in_place(model, plan, **options)
    now = dict(model.named_parameters(remove_duplicate=False))
    for optimizer in made:
        for group in optimizer.param_groups:
            group["params"] = [now[name] for name in (names[id(p)] for p in group["params"]) if name in now]
    return model


def _check_new(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    kind = type(optimizer).__name__
    if optimizer.state:
        raise OptimizerError(
            f"the {kind} has made steps on the model's whole parameters, which its state is of; give a new optimizer, "
            "and load the state of a checkpoint after the model is distributed"
        )
    strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in names]
    if strange:
        raise OptimizerError(
            f"the {kind} holds {len(strange)} parameters that are not the model's (the first has shape "
            f"{tuple(strange[0].shape)}); make it of model.parameters() of the model that is distributed"
        )


def check_optimizers(optimizers: Sequence[torch.optim.Optimizer], model: nn.Module, instead: str) -> None:
    """Refuse what would leave a distributed model as it is, or a checkpoint without state.

    Args:
        optimizers: all that there are.
        model: distributed, or what holds it.
        instead: what to do about an optimizer of other parameters.

    Raises:
        OptimizerError: for more than one, or parameters that the model does not have.
    """
    if len(optimizers) > 1:
        raise OptimizerError(
            f"there are {len(optimizers)} optimizers, and a checkpoint of a plan keeps the state of one; give one "
            "optimizer with groups of parameters"
        )
    known = {id(parameter) for parameter in model.parameters()}
    for optimizer in optimizers:
        strange = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
        if strange:
            raise OptimizerError(
                f"the {type(optimizer).__name__} holds {len(strange)} parameters that the distributed model does not "
                f"have; {instead}"
            )


def call_whole_steps(model: nn.Module) -> None:
    """Let a call in training run a whole step, whose gradients the loss's `backward()` adds, where the plan has
    micro-batches or stages."""
    module = distributed_in(model)
    if not runs_whole_steps(module):
        return
    before = type(model)

    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if DECORATED not in vars(self):  # it is being captured, and is the original
            return before.__call__(self, *args, **kwargs)
        follow(self)
        return called_in_whole_steps(module, *args, **kwargs)

    body = {"__module__": before.__module__, "__qualname__": before.__qualname__, "__doc__": before.__doc__}
    model.__class__ = type(before.__name__, (before,), {**body, "__call__": call})
