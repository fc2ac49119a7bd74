"""Free lunches that a wrong formulation serves, and other traps: each test fails where its protection is missing.

Where a trap has its test elsewhere: an arc that several share is paid once, a free cycle conjures no copy, what is kept
twice is counted once, the peak is a maximum over moments (test_ilp); folding loses nothing, baselines are never dropped
as dominated (test_search); what leaves a block is kept (test_search_recompute); every tensor pays its own latency,
because the runtime sends it by itself (test_search_evaluate).
"""

import itertools
import math
import random
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture
from autopar.cost_models.collectives import collective_seconds
from autopar.cost_models.links import axis_links
from autopar.errors import InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact import ilp
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.extract import extract
from autopar.search.graph.problem import Problem
from autopar.search.graph.strategy_graph import (
    Consumer,
    Group,
    KeptMemory,
    Memory,
    Node,
    StrategyGraph,
)
from autopar.search.known.baselines import baseline_plan
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests import brute_force
from tests.search_cases import machine, pricer_of, program_of
from tests.strategy_graphs import random_graph

OVER = 1.02
"""By how much a plan's own walk may hold more than the graph counted (test_search_recompute)."""
RESULT = 64 * 16 * 4
"""Bytes of every tensor that a block of `Chain` makes."""


# Recompute against enumeration by hand, on random small models


class Block(nn.Module):
    """A random chain of products, activations and sums of what came before, with a residual."""

    def __init__(self, steps: tuple[tuple[str, int], ...], width: int) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for kind, _ in steps if kind == "linear")

    def forward(self, x: Tensor) -> Tensor:
        made, layers = [x], iter(self.layers)
        for kind, other in self.steps:
            last, older = made[-1], made[other % len(made)]
            if kind == "linear":
                made.append(next(layers)(last))
            elif kind == "add":
                made.append(last + older)
            else:
                made.append(last * older if kind == "mul" else getattr(torch, kind)(last))
        return made[-1] + x


class Chain(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        rng = random.Random(seed)
        kinds = [rng.choice(("tanh", "sigmoid", "exp", "mul", "add", "linear")) for _ in range(rng.randint(2, 3))]
        steps = tuple((kind, rng.randrange(8)) for kind in ("linear", *kinds))
        self.blocks = nn.ModuleList(Block(steps, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@lru_cache
def chain(seed: int) -> tuple[Program, Pricer]:
    torch.manual_seed(seed)
    program = make_program(capture(Chain(seed), (), {"x": torch.zeros(64, 16)}))
    return program, pricer_of((1,))


Set = tuple[frozenset[str], float, float]
"""Ops that are run again, seconds of a step, peak bytes."""


@lru_cache
def every_set(seed: int) -> list[Set]:
    """Each set of ops of blocks, priced by `evaluate`. What leaves a block is kept, else blocks lean on each other."""
    program, pricer = chain(seed)
    problem = build(program, pricer, limit=None)
    plan = extract(problem, ilp.solve(problem.graph), pricer.cluster, pricer.config, "ilp")
    blocks = [[op.name for op in program.ops if op.module.startswith(f"blocks.{i}")] for i in (0, 1)]
    inner = [name for names in blocks for name in names[:-1]]
    out = []
    for chosen in itertools.product((False, True), repeat=len(inner)):
        names = frozenset(itertools.compress(inner, chosen))
        estimate = evaluate_program(replace(plan, recompute=names), program, pricer)
        out.append((names, estimate.step_seconds, estimate.peak_nbytes))
    return out


def known_sets(seed: int, problem: Problem) -> list[Set]:
    """Of these sets those of whole clusters that the graph may run again, with the bytes that it counts for what is run
    again: all of a block at once."""
    program, _ = chain(seed)
    clusters = [
        (names, len(problem.options[node]) > problem.num_kept[node])
        for node, cluster in enumerate(problem.clusters)
        for names in ({program.ops[p].name for p in positions} for positions in cluster.instances)
    ]
    instances = [[{program.ops[p].name for p in positions} for positions in c.instances] for c in problem.clusters]
    out = []
    for names, seconds, nbytes in every_set(seed):
        whole = all(own <= names if free and own & names else not own & names for own, free in clusters)
        alike = all(len({own <= names for own in owns}) == 1 for owns in instances)
        if whole and alike:
            most = max(sum(op.name in names for op in program.ops if op.module[:8] == f"blocks.{i}") for i in (0, 1))
            out.append((names, seconds, nbytes + most * RESULT))
    return out


def least(sets: list[Set], limit: float) -> float:
    """The fewest seconds of any set that fits."""
    return min((seconds for _, seconds, nbytes in sets if nbytes <= limit), default=float("inf"))


@pytest.mark.parametrize("seed", [1, 2])
def test_kept_and_run_again_are_those_that_enumeration_finds(seed: int) -> None:
    """For each limit: the graph's optimum is brute force's, the plan's price and bytes are the walk's own, no set that
    the graph knows and that fits is cheaper, and none is conjured: it costs no less than some set that fits."""
    program, pricer = chain(seed)
    free = every_set(seed)[0][2]
    again = 0
    for part in (1.1, 0.95, 0.9, 0.85, 0.8):
        limit = part * free
        problem = build(program, pricer, limit=limit, builder=RecomputeBuilder)
        few = math.prod(len(node.seconds) for node in problem.graph.nodes) <= 1000
        try:
            found = ilp.solve(problem.graph, relative_gap=0.0)
        except InfeasibleError as error:
            assert error.least_nbytes is not None and error.least_nbytes > limit
            assert least(known_sets(seed, problem), limit) == float("inf"), "a set fits that the graph knows"
            continue
        if few:
            assert found.seconds == pytest.approx(brute_force.solve(problem.graph).seconds, rel=1e-7)
        plan = extract(problem, found, pricer.cluster, pricer.config, "ilp")
        estimate = evaluate_program(plan, program, pricer)
        assert estimate.step_seconds == pytest.approx(found.seconds, rel=1e-9)
        assert estimate.peak_nbytes <= OVER * limit
        assert least(every_set(seed), OVER * limit) <= found.seconds * (1 + 1e-9), "cheaper than any set that fits"
        assert found.seconds <= least(known_sets(seed, problem), limit) * (1 + 1e-9), "a set that fits is cheaper"
        again += bool(plan.recompute)
    assert again, "memory never bound"


# Copies and zero-cost variables


def cycle(limit: float, free: float) -> StrategyGraph:
    """A tensor given at 0 and, for backward, kept where it is wanted: at 1 (6 bytes) or 2 (1 byte).

    1 <-> 2 is free both ways, 0 -> 1 costs 5 and 0 -> 2 costs `free`.
    """
    group = Group(
        name="tensor",
        producer=0,
        gives=np.array([0]),
        consumers=(Consumer(node=1, wants=np.array([1, 2])),),
        num_vertices=3,
        arc_source=np.array([0, 0, 1, 2]),
        arc_target=np.array([1, 2, 2, 1]),
        arc_seconds=np.array([5.0, free, 0.0, 0.0]),
    )
    kept = KeptMemory(
        group=0, nbytes=np.array([9.0, 6.0, 1.0]), coefficient=np.ones(1), keeps_given=False, keepers=(0,)
    )
    return StrategyGraph(
        nodes=(Node(name="producer", seconds=np.zeros(1)), Node(name="user", seconds=np.array([0.0, 1.0]))),
        groups=(group,),
        memory=Memory(limit=limit, base=np.zeros(1), kept=(kept,)),
    )


@pytest.mark.parametrize(
    ("limit", "free", "seconds"), [(6.0, 7.0, 5.0), (5.0, 7.0, 6.0), (5.0, 2.0, 3.0), (6.0, 2.0, 2.0)]
)
def test_a_kept_copy_is_not_conjured_by_a_cycle(limit: float, free: float, seconds: float) -> None:
    """Kept at 2 it must have come from 0: by way of 1 for 5, or straight; never out of the free cycle 1 <-> 2."""
    graph = cycle(limit, free)
    found = ilp.solve(graph, relative_gap=0.0)
    assert found.seconds == pytest.approx(seconds) == brute_force.solve(graph).seconds


@pytest.mark.parametrize("first", [0, 40])
def test_no_variable_is_left_set_that_nothing_needs(first: int) -> None:
    """Arcs for nothing are free to set where memory is slack. Of the arcs of a solution none can be left out."""
    checked = 0
    for seed in range(first, first + 40):
        graph = random_graph(seed)
        free = tuple(replace(group, arc_seconds=np.zeros(len(group.arc_seconds))) for group in graph.groups)
        graph = replace(graph, groups=free, memory=None)
        try:
            found = ilp.solve(graph, relative_gap=0.0)
        except InfeasibleError:
            continue
        for group, arcs in zip(graph.groups, found.arcs, strict=True):
            root = int(group.gives[found.choice[group.producer]])
            wanted = {int(c.wants[found.choice[c.node]]) for c in group.consumers} - {-1}
            assert wanted <= reached(group, root, list(arcs))
            for left_out in arcs:
                assert not wanted <= reached(group, root, [a for a in arcs if a != left_out]), seed
                checked += 1
    assert checked > 20


def reached(group: Group, root: int, arcs: list[int]) -> set[int]:
    out, grew = {root}, True
    while grew:
        new = {int(group.arc_target[a]) for a in arcs if int(group.arc_source[a]) in out} - out
        out |= new
        grew = bool(new)
    return out


def test_nothing_is_run_again_where_that_is_free_and_memory_slack() -> None:
    """Ops that take no time: run again or kept costs the same, and the plan must not say that it runs them again."""
    program, _ = chain(1)
    cluster = machine()
    device = replace(cluster.device, launch_seconds=0.0, memory_bandwidth=1e30, peak_flops=(("fp32", 1e30),))
    pricer = make_pricer(mesh=make_mesh((1,)), cluster=replace(cluster, device=device), config=TrainConfig())
    problem = build(program, pricer, limit=1e12, builder=RecomputeBuilder)
    plan = extract(problem, ilp.solve(problem.graph), pricer.cluster, pricer.config, "ilp")
    assert not plan.recompute and not plan.remade


# Collectives over several axes, and the optimizer's time


def two_levels() -> Cluster:
    """Nodes of four devices, links between nodes thirty times slower than within."""
    return load_cluster("4x4xh100")


def test_a_gradient_over_several_axes_is_one_collective_with_its_own_price() -> None:
    """Summed axis by axis, the slow axis carries the whole tensor: data parallel training costs several times as much.

    As one it is no dearer than a reduce-scatter within nodes, an all-reduce of a fourth across and an all-gather
    within; and that is what a plan of data parallel training is charged.
    """
    cluster, nbytes = two_levels(), 256e6
    inner, outer, both = (axis_links(cluster, (4, 4), axes) for axes in ((1,), (0,), (0, 1)))
    apart = collective_seconds("all_reduce", nbytes, outer)[0] + collective_seconds("all_reduce", nbytes, inner)[0]
    hierarchical = (
        collective_seconds("reduce_scatter", nbytes, inner)[0]
        + collective_seconds("all_reduce", nbytes / 4, outer)[0]
        + collective_seconds("all_gather", nbytes, inner)[0]
    )
    whole = collective_seconds("all_reduce", nbytes, both)[0]
    assert whole <= hierarchical * 1.1 and whole < 0.5 * apart
    program = program_of("llama")
    mesh = make_mesh((2, 2))
    small = load_cluster("2x2xh100")
    pricer = make_pricer(mesh=mesh, cluster=small, config=TrainConfig())
    plan = baseline_plan("ddp", program, pricer, None)
    links = axis_links(small, (2, 2), (0, 1))
    sizes = [t.element_size * int(np.prod(t.shape)) for t in program.tensors.values() if t.kind == "parameter"]
    together = sum(collective_seconds("all_reduce", n, links)[0] for n in sizes)
    beside = plan.estimate.seconds["all_reduce"] - together  # the loss and the number of its labels
    assert 0 <= beside <= 3 * collective_seconds("all_reduce", 8, links)[0]


def test_the_optimizers_time_is_what_makes_sharded_state_better() -> None:
    """On links that cost next to nothing every rank would update everything, were its time not in the objective."""
    program = program_of("llama")
    cluster = machine(4, 1e15)
    slow = replace(cluster, device=replace(cluster.device, memory_bandwidth=1e8))
    for states in ("adamw", "sgd-momentum"):
        config = TrainConfig(optimizer=states)
        plan = make_plan(program.captured, slow, make_mesh((4,)), config, SearchOptions(with_baselines=False))
        ddp = baseline_plan("ddp", program, make_pricer(mesh=make_mesh((4,)), cluster=slow, config=config), None)
        assert plan.estimate.seconds["optimizer"] < 0.5 * ddp.estimate.seconds["optimizer"]
        assert plan.estimate.memory["optimizer"] < 0.5 * ddp.estimate.memory["optimizer"]


# Capture


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return (self.layer(ids) - 2 * labels).square().mean()


def test_one_tensor_passed_twice_is_two_inputs() -> None:
    """As `input_ids` and `labels` often are: export would merge them, and the labels of training would be lost."""
    x = torch.randn(8, 4)
    captured = capture(Pair(), (), {"ids": x, "labels": x})
    assert [spec.path for spec in captured.inputs] == ["ids", "labels"]
