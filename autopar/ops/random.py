"""Which random numbers does an op draw? Those of (seed, step, site, shard), so that replicas agree and shards differ.

The runtime binds a `Draws` for each step. With `exact` every rank draws for the whole tensor from (seed, step, site)
and takes its own slice: a sharded run then equals the whole run element for element, which verification needs and
which costs the whole tensor's draws on each rank. Unbound, ops draw from torch's default generator as in any program.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from threading import RLock

import torch

from autopar.ops.groups import BOUND, active_groups

COPY = 2**32
"""Sites of a woven step's further micro-batches are so far apart: each draws as a step of its own."""

_GENERATORS = RLock()
"""Held while torch's default generators are another's: threads of a process share them."""

Shards = tuple[tuple[str, int], ...]
"""`(axis name, dim)` for each axis that splits the tensor, outermost split first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draws:
    """The random numbers of one step (one micro-batch counts as one step; steps of evaluation are below zero)."""

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
    """What `use_draws` bound, or None; in traced code its numbers are in a tensor (`autopar.ops.groups`)."""
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


@contextmanager
def seeded_default_generator(seed: int, device: torch.device) -> Iterator[None]:
    """Torch's default generator of `device` seeded inside, restored after: for kernels that take no generator."""
    devices = [device] if device.type != "cpu" else []
    with _GENERATORS, torch.random.fork_rng(devices=devices, device_type=_forkable(device)):
        torch.manual_seed(seed)
        yield


def _forkable(device: torch.device) -> str:
    return device.type if device.type != "cpu" else "cuda"
