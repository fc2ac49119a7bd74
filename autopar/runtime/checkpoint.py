"""How is training saved so that it goes on under another plan or number of ranks? By torch's own checkpoints.

DTensors say which part of which whole tensor a rank holds; torch.distributed.checkpoint writes parts and reads whatever
part the new layout asks for. Optimizer state and settings are keyed by parameter name, so that ranks of a pipeline,
which hold different parameters, write and read their own.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autopar.errors import PlanMismatchError
from autopar.runtime.optimizers import check_optimizer
from autopar.runtime.trainable import Trainable

_OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)

STREAM = ("seed", "num_calls", "num_evaluated")
"""What says which random numbers come next."""


def save(module: Trainable, optimizer: torch.optim.Optimizer, path: str | Path) -> None:
    """Write parameters, buffers, optimizer state and where random numbers stand to the folder `path`; all ranks call
    this."""
    state_dict_saver.save(_state(module, optimizer), checkpoint_id=str(path))


def load(module: Trainable, optimizer: torch.optim.Optimizer, path: str | Path) -> None:
    """Restore what `save` wrote, in place; plan, mesh and number of ranks may be others. All ranks call this.

    Random numbers go on where they were, whatever the new process was seeded with.

    Raises:
        PlanMismatchError: if the folder holds no checkpoint of such a model and optimizer.
    """
    state = _state(module, optimizer)
    try:
        state_dict_loader.load(state, checkpoint_id=str(path))
    except (CheckpointException, FileNotFoundError) as error:
        raise PlanMismatchError(
            f"{path} does not hold a checkpoint of this model and optimizer: {error}; give the folder that "
            "autopar.runtime.save wrote, and the same kind of optimizer"
        ) from error
    set_state_dict(
        module, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"], options=_OPTIONS
    )
    module.seed, module.num_calls, module.num_evaluated = (state[name] for name in STREAM)


def _state(module: Trainable, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    check_optimizer(optimizer)
    model, optim = get_state_dict(module, optimizer, options=_OPTIONS)
    return {"model": model, "optimizer": optim, **{name: getattr(module, name) for name in STREAM}}
