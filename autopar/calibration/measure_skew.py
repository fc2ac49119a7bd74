"""How long do ranks that computed wait for each other? Products and a small collective in turn, less the two alone.

A collective that follows another starts when all ranks have just met; one that follows a computation starts with the
last that ends it: clocks, schedulers of shared cores and other jobs see to it that they do not end together. Several
lengths of computation show whether that grows with it.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch.nn import functional as F

from autopar.calibration.measure_collectives import ELEMENT_SIZE, collective_call, measuring_mesh
from autopar.calibration.samples import SkewSample
from autopar.calibration.timing import Tell, TimedRounds
from autopar.ops.groups import use_groups
from autopar.runtime.groups import build_groups

KINDS = ("all_reduce", "all_gather")
NBYTES = 64 << 10
PRODUCTS = (4, 8, 16)
"""How many stand between two collectives: some milliseconds of work."""
SIZE = {"cpu": 256, "cuda": 4096}
"""Rows and columns of a product's square matrices."""


class SkewRounds:
    """Products, a collective, and both in turn, one behind the other and round by round; all ranks make and call this
    together."""

    def __init__(self, level_sizes: Sequence[int], *, device: torch.device, tell: Tell) -> None:
        mesh, places = measuring_mesh(level_sizes)
        places = tuple(place for place in places if place.level is not None)
        self.wanted = list(itertools.product(places, KINDS, PRODUCTS))
        _, self.groups = build_groups(mesh, device.type, [place.axes for place in places])
        source = torch.ones(NBYTES // ELEMENT_SIZE, device=device)
        x = torch.ones(SIZE[device.type], SIZE[device.type], device=device)
        calls = []
        for place, kind, count in self.wanted:
            alone = _products(x, count), collective_call(kind, place.axes, NBYTES, source, self.groups)
            calls += [*alone, _in_turn(*alone)]
        with use_groups(self.groups), torch.no_grad():
            self.rounds = TimedRounds(calls, device, tell, "computation and collectives in turn")

    def run(self, tell: Tell) -> None:
        with use_groups(self.groups), torch.no_grad():
            self.rounds.run(tell)

    def samples(self) -> tuple[SkewSample, ...]:
        seconds = self.rounds.typical()
        return tuple(
            SkewSample(
                kind=kind,
                level=place.level,
                group_size=place.size,
                compute_seconds=compute,
                seconds=together - compute - collective,
            )
            for (place, kind, _), compute, collective, together in zip(
                self.wanted, seconds[::3], seconds[1::3], seconds[2::3], strict=True
            )
            if place.level is not None
        )


def _products(x: torch.Tensor, count: int) -> Callable[[], object]:
    def run() -> None:
        for _ in range(count):
            F.linear(x, x)

    return run


def _in_turn(compute: Callable[[], object], collective: Callable[[], object]) -> Callable[[], object]:
    def run() -> None:
        compute()
        collective()

    return run
