"""One bound within memory, of meshes alike and two numbers of micro-batches, is below what each takes by itself."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.search.alike_meshes import first_alike
from autopar.search.exact.ilp import CutoffError
from autopar.search.exact.limited_bound import GAP
from autopar.search.joint.candidates import Candidate
from autopar.search.joint.joint import Joint
from autopar.search.joint.known_prices import KnownPrices
from autopar.search.joint.questions import Question, Refining, Setup
from autopar.search.joint.shared_bounds import MISSES, SharedBounds, pairs
from autopar.search.meshes import Arrangement
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine

BATCH = 4096


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)) for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return (x * x).sum()


@cache
def samples(size: int | None) -> CapturedModel:
    with torch.device("meta"):
        return capture(Mlp(), (torch.empty(size or BATCH, 256),), {})


def graph(microbatches: int) -> CapturedModel:
    return accumulate_gradients(samples(BATCH // microbatches), microbatches, lambda: samples(BATCH))


def candidate(microbatches: int, *shape: int) -> Candidate:
    mesh = make_mesh(shape)
    arrangement = Arrangement(pipeline=1, cluster=machine(math.prod(shape)), mesh=mesh)
    return Candidate(arrangement=arrangement, microbatches=microbatches)


def test_each_number_is_in_one_pair() -> None:
    assert pairs((1, 2, 4, 8, 16)) == {1: 1, 2: 4, 8: 16}
    assert pairs(divisors(24)) == {1: 1, 2: 4, 3: 6, 8: 8, 12: 24}
    assert pairs((3, 5)) == {3: 3, 5: 5}


def test_who_is_bounded_together() -> None:
    together, best = SharedBounds(counts=(1, 2, 4)), 1.0
    assert together.of(candidate(2, 8, 2), best, lambda _: True) is None, "few axes"
    first = candidate(2, 2, 2, 4)
    assert together.of(candidate(4, 4, 2, 2), best, lambda _: True) == (first, 4)
    assert together.of(candidate(4, 4, 2, 2), best, lambda _: False) == (candidate(4, 2, 2, 4), 4), "the other is out"
    assert together.of(candidate(1, 4, 2, 2), best, lambda _: True) == (candidate(1, 2, 2, 4), 1), "1 has no other"
    assert together.of(candidate(1, 2, 2, 2), best, lambda _: True) is None, "no other mesh is alike"
    assert together.answered((first, 4), best, True) == [first, candidate(4, 2, 2, 4)]
    assert together.of(candidate(4, 4, 2, 2), best, lambda _: True) is None, "asked already"
    for _ in range(MISSES):
        together.answered((candidate(1, 2, 2, 4), 1), best, False)
    assert together.of(candidate(4, 4, 2, 2), best, lambda _: False) is None, "of no use"
    assert together.of(candidate(4, 4, 2, 2), best / 2, lambda _: False) is not None, "a better plan excludes more"


@pytest.mark.parametrize(("share", "buckets"), [(0.3, False), (0.5, False), (0.5, True)])
def test_a_bound_of_many_is_below_that_of_each(share: float, buckets: bool) -> None:
    """Of linear programs, climbed to `GAP` of the best prices; where memory binds it is above that without a limit."""
    plan = make_plan(graph(2), machine(8), make_mesh((2, 4)), TrainConfig(), SearchOptions(with_baselines=False))
    config = TrainConfig(memory_nbytes=share * plan.estimate.peak_nbytes)
    setup = Setup(
        counts=(1, 2, 4, 8),
        cluster=machine(8),
        config=config,
        options=SearchOptions(relative_gap=0.02, buckets=buckets),
    )
    free = Joint(graph=graph, setup=replace(setup, config=TrainConfig()))
    joint = Joint(graph=graph, setup=setup)
    binding = 0
    for least, most in pairs(setup.counts).items():
        first = candidate(least, 2, 4)
        shared = joint.answer(Refining(key=first, most=most, cutoff=math.inf)).bound
        without = free.answer(Refining(key=first, cutoff=math.inf)).bound
        binding += without * (1 + GAP) < shared < math.inf
        for count in (least, most):
            for shape in ((2, 4), (4, 2)):
                one = candidate(count, *shape)
                assert first_alike(one.arrangement) == first.arrangement
                own = joint.answer(Refining(key=one, cutoff=math.inf)).bound
                assert 0.0 < shared <= own * (1 + 2 * GAP), (one, most)
    assert binding


def test_prices_are_those_of_one_micro_batch_whatever_ends_the_search() -> None:
    known = KnownPrices()
    with pytest.raises(CutoffError), known.at(1, 4) as prices:
        prices.update({7: 8.0, 9: math.inf})
        raise CutoffError(1.0)
    assert known.of(1) == {7: 2.0, 9: math.inf}
    with known.at(2, 8) as prices:
        assert prices == {7: 32.0, 9: math.inf}, "of a model on half of the devices, in twice as many parts"


def test_what_was_bounded_together_is_not_asked_again() -> None:
    """Two numbers of micro-batches on three axes, both excluded by one bound, neither where it does not reach."""
    plan = make_plan(graph(2), machine(8), make_mesh((2, 4)), TrainConfig(), SearchOptions(with_baselines=False))
    config = TrainConfig(memory_nbytes=0.5 * plan.estimate.peak_nbytes)
    setup = Setup(counts=(4, 8), cluster=machine(8), config=config, options=SearchOptions(relative_gap=0.0))
    few, many = candidate(4, 2, 2, 2), candidate(8, 2, 2, 2)
    shared = Joint(graph=graph, setup=setup).answer(Refining(key=few, most=8, cutoff=math.inf)).bound
    for cutoff, excluded in ((0.999 * shared, True), (1.5 * shared, False)):
        joint, asked = Joint(graph=graph, setup=setup), list[Refining]()
        joint._best, ask = cutoff, joint._prefetch.here

        def noted(question: Question, asked: list[Refining] = asked, ask: Callable[[Question], Any] = ask) -> Any:
            asked += [question] if isinstance(question, Refining) else []
            return ask(question)

        joint._prefetch.here = noted
        for key in (few, many):
            while not joint.sharpen(key, cutoff):
                pass
        for key in (many, few):
            joint.refine(key, cutoff)
            assert (joint.bound(key) >= cutoff) == excluded
        assert [(one.key, one.most) for one in asked] == [(few, 8), *([] if excluded else [(many, 0), (few, 0)])]
