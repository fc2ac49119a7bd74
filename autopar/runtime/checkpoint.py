"""How is training saved so that it goes on under another plan or number of ranks? By torch's own checkpoints.

DTensors say which part of which whole tensor a rank holds; torch.distributed.checkpoint writes parts and reads whatever
part the new layout asks for. Optimizer state and settings are keyed by parameter name, so that ranks of a pipeline,
which hold different parameters, write and read their own.
"""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autopar.errors import ArgumentError, PlanMismatchError
from autopar.runtime.optimizers import check_optimizer
from autopar.runtime.trainable import DECORATED, Trainable

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

STREAM = ("seed", "num_calls", "num_evaluated")
"""What says which random numbers come next."""


def save(module: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Write parameters, buffers, optimizer state and where random numbers stand to the folder `path`; all ranks call
    this. module: distributed, or a decorated model that is; optimizer: None for a module without (a moving average)."""
    state_dict_saver.save(_state(distributed_in(module), optimizer), checkpoint_id=str(path))


def load(module: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | Path) -> None:
    """Restore what `save` wrote, in place; plan, mesh and number of ranks may be others. All ranks call this.

    Random numbers go on where they were, whatever the new process was seeded with.

    Raises:
        PlanMismatchError: if the folder holds no checkpoint of such a model and optimizer.
    """
    own = distributed_in(module)
    state = _state(own, optimizer)
    try:
        state_dict_loader.load(state, checkpoint_id=str(path))
    except (CheckpointException, FileNotFoundError) as error:
        raise PlanMismatchError(
            f"{path} does not hold a checkpoint of this model and optimizer: {error}; give the folder that "
            "autopar.runtime.save wrote, and the same kind of optimizer"
        ) from error
    optimizers = () if optimizer is None else (optimizer,)
    set_state_dict(
        own, optimizers, model_state_dict=state["model"], optim_state_dict=state.get("optimizer", {}), options=_OPTIONS
    )
    own.seed, own.num_calls, own.num_evaluated = (state[name] for name in STREAM)


def distributed_in(module: nn.Module) -> Trainable:
    """The distributed module itself, of a decorated model the one that it became.

    Raises:
        ArgumentError: if it is none.
    """
    own = vars(module).get(DECORATED, module)
    if not isinstance(own, Trainable):
        raise ArgumentError(
            f"{type(module).__name__} is no distributed module; give what autopar.distribute returned, or a decorated "
            "model after its first call"
        )
    return own


def _state(module: Trainable, optimizer: torch.optim.Optimizer | None) -> dict[str, Any]:
    module.flush()
    stream = {name: getattr(module, name) for name in STREAM}
    if optimizer is None:
        return {"model": get_state_dict(module, (), options=_OPTIONS)[0], **stream}
    check_optimizer(optimizer)
    model, optim = get_state_dict(module, optimizer, options=_OPTIONS)
    return {"model": model, "optimizer": optim, **stream}
