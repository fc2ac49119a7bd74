"""Random ops of torch as they are: samples of what a tensor says (poisson, multinomial, ...), layers that drop inside.

`drawn("poisson.default", rates, site=3)` runs the op under numbers of its own. Where every element, or every row, is a
sample of its own (`ROW_DIMS`), a rank samples its shard.
"""

import math
from typing import Any

import torch
from torch import Tensor

from autopar.ops.groups import active_groups
from autopar.ops.random import Draws, Shards, active_draws, seeded_default_generator, shard_index
from autopar.ops.regather import once
from autopar.ops.shards import own_slice

ROW_DIMS = {
    "poisson.default": 0,
    "binomial.default": 0,
    "_standard_gamma.default": 0,
    "multinomial.default": 1,
    "_sample_dirichlet.default": 1,
}
"""How many dims at the end make one sample."""

GAMMA, DIRICHLET = "_standard_gamma.default", "_sample_dirichlet.default"


def drawn(
    op: str, *args: Any, site: int, shape: tuple[int, ...] | None = None, shards: Shards = (), **kwargs: Any
) -> Any:
    """`torch.ops.aten.<op>(*args, **kwargs)`; `site` names the call.

    shape, shards: of the whole first operand, and how it is split.
    """
    if op in (GAMMA, DIRICHLET) and args[0].requires_grad:
        sample = drawn(op, args[0].detach(), site=site, shape=shape, shards=shards)
        return _Reparametrized.apply(op, args[0], sample)  # type: ignore[no-untyped-call]
    if op == DIRICHLET and args[0].is_meta:  # torch has no such kernel
        return torch.empty_like(args[0])
    target = overload(op)
    draws = active_draws()
    if draws is None:
        return once(target, *args, **kwargs)
    if draws.exact and op in ROW_DIMS:
        return _one_by_one(draws, op, args, site, shape, shards)
    device = next(arg.device for arg in _tensors(args))
    seed = draws.seed_of(site, shard_index(shards))
    if takes_generator(target):
        return once(target, *args, **kwargs, generator=torch.Generator(device=device).manual_seed(seed))
    with seeded_default_generator(seed, device):
        return once(target, *args, **kwargs)


def overload(op: str) -> Any:
    """The op of that name: `poisson.default`."""
    name, _, kind = op.partition(".")
    return getattr(getattr(torch.ops.aten, name), kind)


def takes_generator(target: Any) -> bool:
    return any(argument.name == "generator" for argument in target._schema.arguments)


def _tensors(args: Any) -> list[Tensor]:
    found = [arg if isinstance(arg, tuple | list) else (arg,) for arg in args]
    return [value for values in found for value in values if isinstance(value, Tensor)]


def _one_by_one(
    draws: Draws, op: str, args: tuple[Any, ...], site: int, shape: tuple[int, ...] | None, shards: Shards
) -> Tensor:
    """Each sample under a seed of its own, whichever rank makes it: what a kernel draws depends on what it reads."""
    target, own = overload(op), args[0].shape
    lead = len(own) - ROW_DIMS[op]
    places = torch.arange(math.prod((shape or own)[:lead])).reshape((shape or own)[:lead])
    places = own_slice(places, shards, active_groups()) if shards else places
    generator = torch.Generator(device=args[0].device)

    def row(value: Any, number: int) -> Any:
        return value.expand(own).reshape(-1, *own[lead:])[number] if isinstance(value, Tensor) else value

    samples = []
    with torch.no_grad():
        for number, place in enumerate(places.flatten().tolist()):
            generator.manual_seed(draws.seed_of(site, place))
            samples.append(target(*(row(arg, number) for arg in args), generator=generator))
    if not samples:
        return torch.empty_like(target(*args, generator=generator))
    sample = torch.stack(samples)
    return sample.reshape(*own[:lead], *sample.shape[1:])


class _Reparametrized(torch.autograd.Function):
    """The sample, with its gradient. That of Dirichlet's is of `torch.distributions.Dirichlet`: torch's op has none."""

    @staticmethod
    def forward(ctx: Any, op: str, concentration: Tensor, sample: Tensor) -> Tensor:
        ctx.op = op
        ctx.save_for_backward(sample, concentration)
        return sample.view_as(sample)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        sample, concentration = ctx.saved_tensors
        if ctx.op == GAMMA:
            return None, gradient * torch.ops.aten._standard_gamma_grad.default(concentration, sample), None
        total = concentration.sum(-1, True).expand_as(concentration)
        slope = torch.ops.aten._dirichlet_grad.default(sample, concentration, total)
        return None, slope * (gradient - (sample * gradient).sum(-1, True)), None
