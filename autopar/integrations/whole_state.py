"""What is the state dict of the original model, whole, for files that other programs read?

Each tensor is gathered on all ranks and kept in the CPU's memory of those that write: one whole tensor at a time on the
device. A tensor of another stage comes from a rank that has it.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.runtime.checkpoint import distributed_in
from autopar.runtime.lost_ranks import among_ranks
from autopar.runtime.pipeline import PipelinedModule

Named = dict[str, tuple[str, tuple[int, ...], torch.dtype]]
"""Of each name of a rank's state dict: the first name of what may be tied, its shape and dtype."""


def whole_state(module: nn.Module, *, keep: bool) -> dict[str, Tensor]:
    """Parameters and persistent buffers of the original model by name, on the CPU; all ranks call this.

    Args:
        module: distributed, or a model that became distributed. Tied parameters are one tensor.
        keep: whether this rank wants them; elsewhere the answer is empty.

    Raises:
        RankError: if a rank died or did not come within the collective timeout.
    """
    own = distributed_in(module)
    held = own.state_dict()
    first = {name: spec.names[0] for state in own.states for spec in state.specs.values() for name in spec.names}
    mine: Named = {name: (first.get(name, name), tuple(value.shape), value.dtype) for name, value in held.items()}
    told = [mine]
    if isinstance(own, PipelinedModule):
        told = [{} for _ in range(dist.get_world_size())]
        with among_ranks("naming the tensors of stages"):
            dist.all_gather_object(told, mine)
    made: dict[str, Tensor] = {}
    for source, names in enumerate(told):
        for name, (tied, shape, dtype) in names.items():
            if tied in made:
                continue
            whole = _whole(held[name]) if name in held else torch.empty(shape, dtype=dtype, device=own.device)
            if any(name not in others for others in told):
                with among_ranks(f"sending {name}"):
                    dist.broadcast(whole.contiguous(), src=source)
            made[tied] = whole.cpu() if keep else torch.empty(0)
    every = {name: tied for names in told for name, (tied, _, _) in names.items()}
    return {name: made[tied] for name, tied in every.items()} if keep else {}


def _whole(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.detach()
    with among_ranks("gathering a parameter"):
        whole: Tensor = value.full_tensor()
        return whole.detach()
