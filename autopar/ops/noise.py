"""Random numbers of one distribution, as torch's in-place methods draw them: `noise(like, "normal_", 0.0, 1.0, ...)`.

All of rand, randn, randint, randperm, bernoulli, and what fills a new tensor in place (`uniform_`, `exponential_`, ...)
is one op. No gradient passes it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.ops.groups import BOUND, KNOWN, Groups, active_groups
from autopar.ops.random import Draws, Shards, active_draws
from autopar.ops.shards import own_slice

PERMUTATION = "randperm"
"""The one distribution whose elements depend on one another; the others are methods of a tensor."""

INTEGERS = "random_"
"""The one distribution whose arguments are integers."""

Order = tuple[int, ...] | None
"""Dims from the outermost in memory on, None for a contiguous tensor: torch draws in the order of memory."""


def noise(
    like: Tensor,
    fill: str,
    *numbers: Any,
    size: tuple[int, ...],
    site: int,
    order: Order = None,
    shape: tuple[int, ...] | None = None,
    shards: Shards = (),
) -> Tensor:
    """A new tensor of `size`, one shard of a tensor of `shape`, split over `shards`.

    like: a scalar that tells dtype and device.
    fill: the method of a tensor that draws, `numbers` its arguments (of `bernoulli_` a tensor of probabilities, too);
        or `randperm`.
    site: names the call.
    """
    draws = active_draws()
    if draws is None:
        return _filled(fill, numbers, size, order, like.dtype, like.device, None)
    kind: Any = {"size": size, "shape": shape, "shards": shards, "order": order, "device": like.device}
    if numbers and isinstance(numbers[0], Tensor):
        return (bound(draws, "uniform_", 0.0, 1.0, site=site, dtype=numbers[0].dtype, **kind) < numbers[0]).to(
            like.dtype
        )
    return bound(draws, fill, *numbers, site=site, dtype=like.dtype, **kind)


def bound(
    draws: Draws,
    fill: str,
    *numbers: Any,
    size: Sequence[int],
    shape: Sequence[int] | None,
    shards: Shards,
    site: int,
    dtype: torch.dtype,
    device: torch.device,
    order: Order = None,
) -> Tensor:
    """`noise` of what `use_draws` bound, or of what compiled code is called with."""
    whole = size if shape is None else shape
    if torch.compiler.is_compiling():
        assert BOUND.draw is not None
        split = " ".join(f"{axis} {dim}" for axis, dim in shards)
        made: Tensor = _traced(
            BOUND.draw,
            fill,
            " ".join(f"{number}" for number in numbers),
            size,
            whole,
            order,
            site,
            split,
            BOUND.exact,
            BOUND.number,
            dtype,
            device,
        )
        return made
    return _drawn(draws, fill, numbers, size, whole, order, site, shards, active_groups, dtype, device)


def _drawn(
    draws: Draws,
    fill: str,
    numbers: Sequence[Any],
    size: Sequence[int],
    shape: Sequence[int],
    order: Sequence[int] | None,
    site: int,
    shards: Shards,
    groups: Callable[[], Groups],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    generator = torch.Generator(device=device)
    if not draws.exact or not shards:
        index = groups().index(tuple(axis for axis, _ in shards)) if shards else 0
        generator.manual_seed(draws.seed_of(site, index))
        return _filled(fill, numbers, size, order, dtype, device, generator)
    generator.manual_seed(draws.seed_of(site))
    whole = _filled(fill, numbers, shape, order, dtype, device, generator)
    return _empty(size, order, dtype, device).copy_(own_slice(whole, shards, groups()))


def _filled(
    fill: str,
    numbers: Sequence[Any],
    size: Sequence[int],
    order: Sequence[int] | None,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None,
) -> Tensor:
    if fill == PERMUTATION:
        return torch.randperm(*size, dtype=dtype, device=device, generator=generator)
    made: Tensor = getattr(_empty(size, order, dtype, device), fill)(*numbers, generator=generator)
    return made


def _empty(size: Sequence[int], order: Sequence[int] | None, dtype: torch.dtype, device: torch.device) -> Tensor:
    if order is None:
        return torch.empty(size, dtype=dtype, device=device)
    place = sorted(range(len(order)), key=order.__getitem__)
    return torch.empty([size[dim] for dim in order], dtype=dtype, device=device).permute(place)


@torch.library.custom_op("autopar::noise", mutates_args=())
def _traced(
    draw: Tensor,
    fill: str,
    numbers: str,
    size: Sequence[int],
    shape: Sequence[int],
    order: Sequence[int] | None,
    site: int,
    shards: str,
    exact: bool,
    number: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """`_drawn` of traced code, the same numbers. `draw`: seed, step, and pairs of a site and what it is called here."""
    seed, step, *pairs = draw.tolist()
    site = dict(zip(pairs[::2], pairs[1::2], strict=True)).get(site, site)
    words = shards.split()
    split = tuple(zip(words[::2], map(int, words[1::2]), strict=True))
    values = [int(word) if fill == INTEGERS else float(word) for word in numbers.split()]
    draws = Draws(seed=seed, step=step, exact=exact)
    return _drawn(draws, fill, values, size, shape, order, site, split, lambda: KNOWN[number], dtype, device)


@_traced.register_fake
def _(
    draw: Tensor,
    fill: str,
    numbers: str,
    size: Sequence[int],
    shape: Sequence[int],
    order: Sequence[int] | None,
    *_: Any,
) -> Tensor:
    return _empty(size, order, *_[-2:])
