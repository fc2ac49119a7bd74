"""Which random numbers does an op draw? Those of (seed, step, site, shard), so that replicas agree and shards differ.

The runtime binds a `Draws` for each step. With `exact` every rank draws for the whole tensor from (seed, step, site)
and takes its own slice: a sharded run then equals the whole run element for element, which verification needs and
which costs the whole tensor's draws on each rank. Unbound, ops draw from torch's default generator as in any program.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.ops.bound import BOUND, KNOWN
from autopar.ops.groups import Groups, active_groups
from autopar.ops.shards import own_slice

COPY = 2**32
"""Sites of a woven step's further micro-batches are so far apart: each draws as a step of its own."""

Shards = tuple[tuple[str, int], ...]
"""`(axis name, dim)` for each axis that splits the tensor, outermost split first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The random numbers of one step (one micro-batch counts as one step)."""

    seed: int
    step: int
    exact: bool = False

    def seed_of(self, site: int, shard: int = 0) -> int:
        """A seed in [0, 2^63) that is the same on every machine."""
        copy, site = divmod(site, COPY)
        digest = hashlib.blake2b(f"{self.seed} {self.step + copy} {site} {shard}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1


_active: ContextVar[Draws | None] = ContextVar("autopar_draws", default=None)


def active_draws() -> Draws | None:
    """What `use_draws` bound, or None; in traced code its numbers are in a tensor (`autopar.ops.bound`)."""
    if torch.compiler.is_compiling():
        return None if BOUND.draw is None else Draws(seed=0, step=0, exact=BOUND.exact)
    return _active.get()


@contextmanager
def use_draws(draws: Draws) -> Iterator[None]:
    """Bind the random numbers of one step for the calls inside."""
    token = _active.set(draws)
    try:
        yield
    finally:
        _active.reset(token)


def shard_index(shards: Shards) -> int:
    """Number of this rank's shard, equal on ranks that hold the same one."""
    return active_groups().index(tuple(axis for axis, _ in shards)) if shards else 0


def keep_mask(draws: Draws, x: Tensor, p: float, site: int, shape: tuple[int, ...] | None, shards: Shards) -> Tensor:
    """Bool like `x` (its shard), False with probability `p`; `shape` is that of the whole tensor."""
    if torch.compiler.is_compiling():
        assert BOUND.draw is not None
        split = " ".join(f"{axis} {dim}" for axis, dim in shards)
        mask: Tensor = _drawn(
            BOUND.draw, x.shape, shape or x.shape, p, site, split, BOUND.exact, BOUND.number, x.device
        )
        return mask
    return _mask(draws, tuple(x.shape), shape or tuple(x.shape), p, site, shards, active_groups, x.device)


def _mask(
    draws: Draws,
    shard: Sequence[int],
    shape: Sequence[int],
    p: float,
    site: int,
    shards: Shards,
    groups: Callable[[], Groups],
    device: torch.device,
) -> Tensor:
    generator = torch.Generator(device=device)
    if not draws.exact:
        index = groups().index(tuple(axis for axis, _ in shards)) if shards else 0
        generator.manual_seed(draws.seed_of(site, index))
        return torch.rand(shard, generator=generator, device=device) >= p
    generator.manual_seed(draws.seed_of(site))
    whole = torch.rand(shape, generator=generator, device=device) >= p
    return own_slice(whole, shards, groups()) if shards else whole


@torch.library.custom_op("autopar::keep_mask", mutates_args=())
def _drawn(
    draw: Tensor,
    shard: Sequence[int],
    shape: Sequence[int],
    p: float,
    site: int,
    shards: str,
    exact: bool,
    number: int,
    device: torch.device,
) -> Tensor:
    """`_mask` of traced code, the same numbers. `draw`: seed, step, and pairs of a site and what it is called here."""
    seed, step, *pairs = draw.tolist()
    site = dict(zip(pairs[::2], pairs[1::2], strict=True)).get(site, site)
    words = shards.split()
    split = tuple(zip(words[::2], map(int, words[1::2]), strict=True))
    draws = Draws(seed=seed, step=step, exact=exact)
    return _mask(draws, shard, shape, p, site, split, lambda: KNOWN[number], device)


@_drawn.register_fake
def _(draw: Tensor, shard: Sequence[int], shape: Sequence[int], p: float, site: int, *_: Any) -> Tensor:
    return torch.empty(shard, dtype=torch.bool, device=_[-1])


@contextmanager
def seeded_default_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's default generator of `device` seeded inside, restored after: for kernels that take no generator."""
    with torch.random.fork_rng(devices=[device] if device.type != "cpu" else [], device_type=_forkable(device)):
        torch.manual_seed(seed)
        yield


def _forkable(device: torch.device) -> str:
    return device.type if device.type != "cpu" else "cuda"
