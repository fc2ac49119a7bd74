"""What is a strategy graph made of, and what do its numbers stand for?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.lower.program import Program
from autopar.search.costs.pricing import Pricer
from autopar.search.graph.clusters import OpCluster
from autopar.search.graph.options import Option
from autopar.search.graph.parameters import ParameterSpace
from autopar.search.graph.strategy_graph import Group, Ints, Node, StrategyGraph
from autopar.values.placement import Layout
from autopar.values.redistribution import Step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reader:
    """One way a kind of tensor is read: node and layouts wanted by its options; positions of the ops, of all instances.

    savers: ops an instance of the tensor that keep it. first, last: of the reading ops, per tensor.
    """

    node: int
    wants: tuple[Layout, ...]
    savers: int
    in_backward: bool
    positions: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ArcSteps:
    """The steps of each arc, at most one: that of its number in the lattice, none where it is -1."""

    steps: tuple[Step, ...]
    numbers: Ints

    def __getitem__(self, arc: int) -> tuple[Step, ...]:
        number = int(self.numbers[arc])
        return () if number < 0 else (self.steps[number],)


@dataclass(slots=True, kw_only=True)
class Problem:
    """A strategy graph and what its numbers stand for.

    options[node]: options of a cluster; parameters, inputs by node: (names of the tensors, their options).
    num_kept[node]: options from this number on recompute. replayed_arcs[group]: which arcs are of layer R.
    travels[group]: (names of the tensors, layout of each vertex, None for auxiliary ones; steps of each arc).
    """

    program: Program
    pricer: Pricer
    clusters: tuple[OpCluster, ...]
    nodes: list[Node] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    options: dict[int, list[Option]] = field(default_factory=dict)
    parameters: dict[int, tuple[tuple[str, ...], ParameterSpace]] = field(default_factory=dict)
    inputs: dict[int, tuple[tuple[str, ...], tuple[Layout, ...]]] = field(default_factory=dict)
    travels: list[tuple[tuple[str, ...], tuple[Layout | None, ...], ArcSteps | tuple[tuple[Step, ...], ...]]] = field(
        default_factory=list
    )
    num_kept: dict[int, int] = field(default_factory=dict)
    replayed_arcs: dict[int, NDArray[np.bool_]] = field(default_factory=dict)
    graph: StrategyGraph = field(default_factory=lambda: StrategyGraph(nodes=()))
