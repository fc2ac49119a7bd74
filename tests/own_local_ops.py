"""An op whose sequence ranks share out by the user's own function: each row needs the one before it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import autopar


@torch.library.custom_op("own_local_ops::shifted", mutates_args=())
def shifted(x: Tensor, weight: Tensor) -> Tensor:
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    return x + weight * before


@shifted.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _saves(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    x, weight = ctx.saved_tensors
    before = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    after = torch.cat([gradient[:, 1:], torch.zeros_like(gradient[:, :1])], 1)
    return gradient + weight * after, (gradient * before).sum((0, 1))


shifted.register_autograd(_backward, setup_context=_saves)


class _Halo(torch.autograd.Function):
    """The last row of the rank before; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, last: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return _neighbour(last, group, -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _neighbour(gradients[0], ctx.group, 1), None


def _neighbour(mine: Tensor, group: Any, distance: int) -> Tensor:
    every = [torch.empty_like(mine) for _ in range(group.size())]
    dist.all_gather(every, mine.contiguous(), group=group)
    at = group.rank() + distance
    return every[at] if 0 <= at < len(every) else torch.zeros_like(mine)


def shifted_here(x: Tensor, weight: Tensor, *, group: Any) -> Tensor:
    """`shifted` of this rank's rows."""
    halo = _Halo.apply(x[:, -1:], group)  # type: ignore[no-untyped-call]
    return x + weight * torch.cat([halo, x[:, :-1]], 1)


RULE = "x[b s d], weight[d] -> y[b s d]"
autopar.register_rule(shifted, RULE, local={"s": shifted_here})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.weight = nn.Parameter(torch.rand(128))

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = shifted(torch.tanh(self.up(x)), self.weight)
        loss: Tensor = self.down(mixed).square().mean()
        return loss


def net() -> tuple[nn.Module, dict[str, Tensor]]:
    """The model and its inputs: batch, sequence, features."""
    torch.manual_seed(0)
    return Net(), {"x": torch.randn(4, 8, 64)}
