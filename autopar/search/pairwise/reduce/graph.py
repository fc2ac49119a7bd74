"""What do reductions change in place? A pairwise strategy graph as linked lists in a few arrays, taken as one.

Rows of `node`, `half`, `edge` and `member` are things, columns their fields, named below. Edge e has two halves, 2e and
2e + 1, one in the list of each end; half h belongs to `half[h, NODE]`, the other end is `half[h ^ 1, NODE]`. Its matrix
has entry (i, j), i an option of h's node, at `pair[edge[h // 2, AT] + i * half[h, STRIDE] + j * half[h ^ 1, STRIDE]]`,
so either end may read it by rows.

An option is gone for good when its cost is inf; its room goes in `compact`. `option` keeps the number it had in the
original graph. Memory that is certain is in `base`, as differences: sum them up to a time.

A change stamps its nodes with the time of the clock, and a rule looks only at nodes stamped since it last looked.
"""

from typing import NamedTuple, TypeVar

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints, Pairwise

OPTIONS, COST_AT, DEGREE, FIRST_HALF, FIRST_MEMBER, MEMBERS, ALIVE, STAMP = range(8)
NODE, NEXT, PREVIOUS, STRIDE, FUNCTION = range(5)
AT, CHANGED = range(2)
MEMBER_NEXT, BEGIN, END, USAGE_AT = range(4)
CLOCK, PAIR_TOP, USAGE_TOP, LOG_TOP, PAIR_SHORT, USAGE_SHORT, LOG_SHORT, CHANGES = range(8)

DONE, SHORT, NO_OPTION = range(3)
"""How a rule ends: nothing left to do; a pool is too small by `counts[..._SHORT]`; some node has no option left."""

NONE = -1

Pool = TypeVar("Pool", Floats, Ints)


class Graph(NamedTuple):
    node: Ints
    half: Ints
    edge: Ints
    member: Ints
    cost: Floats
    option: Ints
    pair: Floats
    usage: Floats
    base: Floats
    log: Ints
    counts: Ints
    offset: Floats
    """One number: what every choice costs."""


def from_problem(problem: Pairwise) -> Graph:
    num_nodes, num_edges, num_members = problem.num_nodes, problem.num_edges, len(problem.member_node)
    num_options = problem.num_options()
    node = np.zeros((num_nodes, 8), np.int64)
    node[:, OPTIONS], node[:, COST_AT], node[:, ALIVE] = num_options, problem.first_option[:-1], 1
    half = np.full((2 * num_edges, 5), NONE)
    half[0::2, NODE], half[1::2, NODE] = problem.edge_a, problem.edge_b
    half[0::2, STRIDE], half[1::2, STRIDE] = num_options[problem.edge_b], 1
    edge = np.ones((num_edges, 2), np.int64)
    edge[:, AT] = problem.first_pair[:-1]
    member = np.zeros((num_members, 4), np.int64)
    member[:, BEGIN], member[:, END], member[:, USAGE_AT] = problem.begin, problem.end, problem.first_usage[:-1]
    count = np.zeros(8, np.int64)
    count[PAIR_TOP], count[USAGE_TOP] = len(problem.pair_cost), len(problem.usage)
    graph = Graph(
        node=node,
        half=half,
        edge=edge,
        member=member,
        cost=problem.cost.copy(),
        option=np.arange(len(problem.cost)) - np.repeat(problem.first_option[:-1], num_options),
        pair=_roomier(problem.pair_cost, len(problem.pair_cost) // 4),
        usage=_roomier(problem.usage, len(problem.usage) // 4),
        base=np.diff(problem.base, prepend=0.0, append=0.0),
        log=np.zeros(8 * len(problem.cost) + 64, np.int64),
        counts=count,
        offset=np.zeros(1),
    )
    _link(graph, problem.member_node)
    return graph


def to_problem(graph: Graph, limit: float) -> tuple[Pairwise, Ints]:
    """The graph as a value, and which original nodes its nodes are."""
    nodes = np.flatnonzero(graph.node[:, ALIVE])
    edges = np.flatnonzero(graph.half[0::2, NODE] != NONE)
    position = np.full(len(graph.node), NONE)
    position[nodes] = np.arange(len(nodes))
    num_options = graph.node[nodes, OPTIONS]
    edge_a, edge_b = position[graph.half[2 * edges, NODE]], position[graph.half[2 * edges + 1, NODE]]
    first_pair = starts(num_options[edge_a] * num_options[edge_b])
    members, owner = members_of(graph, nodes)
    in_time = np.lexsort((graph.member[members, END], graph.member[members, BEGIN], owner))
    members, owner = members[in_time], owner[in_time]
    first_usage = starts(num_options[owner])
    base = np.cumsum(graph.base)[:-1]
    problem = Pairwise(
        first_option=starts(num_options),
        cost=graph.cost[ranges(graph.node[nodes, COST_AT], num_options)],
        edge_a=edge_a,
        edge_b=edge_b,
        first_pair=first_pair,
        pair_cost=_matrices(graph, edges, first_pair),
        member_node=owner,
        begin=graph.member[members, BEGIN],
        end=graph.member[members, END],
        first_usage=first_usage,
        usage=graph.usage[ranges(graph.member[members, USAGE_AT], num_options[owner])],
        base=base,
        limit=limit,
    )
    return problem, nodes


def roomier(graph: Graph) -> Graph:
    """With the room in pools that a rule found missing, and half as much again."""
    graph = graph._replace(
        pair=_roomier(graph.pair, _extra(graph.pair, graph.counts[PAIR_SHORT])),
        usage=_roomier(graph.usage, _extra(graph.usage, graph.counts[USAGE_SHORT])),
        log=_roomier(graph.log, _extra(graph.log, graph.counts[LOG_SHORT])),
    )
    graph.counts[[PAIR_SHORT, USAGE_SHORT, LOG_SHORT]] = 0
    return graph


def _extra(pool: Floats | Ints, short: int) -> int:
    return int(short) + len(pool) // 2 if short else 0


def _roomier(pool: Pool, extra: int) -> Pool:
    return np.concatenate([pool, np.zeros(extra, pool.dtype)]) if extra else pool.copy()


def starts(sizes: Ints) -> Ints:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def ranges(begins: Ints, sizes: Ints) -> Ints:
    """begin, begin + 1, ... begin + size - 1 of each, one after the other."""
    return np.repeat(begins - starts(sizes)[:-1], sizes) + np.arange(int(sizes.sum()))


@compiled
def _link(graph: Graph, member_node: Ints) -> None:
    """Put halves and members into the lists of their nodes, in order."""
    graph.node[:, FIRST_HALF] = NONE
    graph.node[:, FIRST_MEMBER] = NONE
    for h in range(len(graph.half) - 1, -1, -1):
        insert_half(graph, h, graph.half[h, NODE])
    for m in range(len(graph.member) - 1, -1, -1):
        insert_member(graph, m, member_node[m])


@compiled
def insert_half(graph: Graph, h: int, n: int) -> None:
    first = graph.node[n, FIRST_HALF]
    graph.half[h, NODE], graph.half[h, NEXT], graph.half[h, PREVIOUS] = n, first, NONE
    if first != NONE:
        graph.half[first, PREVIOUS] = h
    graph.node[n, FIRST_HALF] = h
    graph.node[n, DEGREE] += 1


@compiled
def remove_half(graph: Graph, h: int) -> None:
    n, after, before = graph.half[h, NODE], graph.half[h, NEXT], graph.half[h, PREVIOUS]
    if before != NONE:
        graph.half[before, NEXT] = after
    else:
        graph.node[n, FIRST_HALF] = after
    if after != NONE:
        graph.half[after, PREVIOUS] = before
    graph.half[h, NODE] = NONE
    graph.node[n, DEGREE] -= 1


@compiled
def remove_edge(graph: Graph, e: int) -> None:
    remove_half(graph, 2 * e)
    remove_half(graph, 2 * e + 1)
    graph.counts[CHANGES] += 1


@compiled
def remove_node(graph: Graph, n: int) -> None:
    """With all its edges; its members must have gone elsewhere."""
    while graph.node[n, FIRST_HALF] != NONE:
        h = graph.node[n, FIRST_HALF]
        touch(graph, graph.half[h ^ 1, NODE])
        remove_edge(graph, h // 2)
    graph.node[n, ALIVE] = 0


@compiled
def insert_member(graph: Graph, m: int, n: int) -> None:
    graph.member[m, MEMBER_NEXT] = graph.node[n, FIRST_MEMBER]
    graph.node[n, FIRST_MEMBER] = m
    graph.node[n, MEMBERS] += 1


@compiled
def touch(graph: Graph, n: int) -> None:
    graph.node[n, STAMP] = graph.counts[CLOCK]
    graph.counts[CHANGES] += 1


@compiled
def edge_between(graph: Graph, a: int, b: int) -> int:
    """The half at a of the edge between a and b, or NONE."""
    if graph.node[a, DEGREE] <= graph.node[b, DEGREE]:
        h = graph.node[a, FIRST_HALF]
        while h != NONE:
            if graph.half[h ^ 1, NODE] == b:
                return int(h)
            h = graph.half[h, NEXT]
        return NONE
    h = graph.node[b, FIRST_HALF]
    while h != NONE:
        if graph.half[h ^ 1, NODE] == a:
            return int(h ^ 1)
        h = graph.half[h, NEXT]
    return NONE


@compiled
def has_room(graph: Graph, pairs: int, usages: int, logs: int) -> bool:
    """Whether the pools hold so much more; what is missing is noted."""
    count = graph.counts
    count[PAIR_SHORT] = max(0, count[PAIR_TOP] + pairs - len(graph.pair))
    count[USAGE_SHORT] = max(0, count[USAGE_TOP] + usages - len(graph.usage))
    count[LOG_SHORT] = max(0, count[LOG_TOP] + logs - len(graph.log))
    return bool(count[PAIR_SHORT] == 0 and count[USAGE_SHORT] == 0 and count[LOG_SHORT] == 0)


@compiled
def members_of(graph: Graph, nodes: Ints) -> tuple[Ints, Ints]:
    """Members of the nodes, node by node, and the position of each one's node."""
    total = 0
    for n in nodes:
        total += graph.node[n, MEMBERS]
    members, owner = np.empty(total, np.int64), np.empty(total, np.int64)
    k = 0
    for position in range(len(nodes)):
        m = graph.node[nodes[position], FIRST_MEMBER]
        while m != NONE:
            members[k], owner[k] = m, position
            k += 1
            m = graph.member[m, MEMBER_NEXT]
    return members, owner


@compiled
def _matrices(graph: Graph, edges: Ints, first_pair: Ints) -> Floats:
    values = np.empty(first_pair[-1])
    for k in range(len(edges)):
        at, h = graph.edge[edges[k], AT], 2 * edges[k]
        rows, columns = graph.node[graph.half[h, NODE], OPTIONS], graph.node[graph.half[h + 1, NODE], OPTIONS]
        by_row, by_column = graph.half[h, STRIDE], graph.half[h + 1, STRIDE]
        for i in range(rows):
            for j in range(columns):
                values[first_pair[k] + i * columns + j] = graph.pair[at + i * by_row + j * by_column]
    return values
