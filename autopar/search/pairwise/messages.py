"""What do messages along edges prove about the cost of every choice, memory aside? (TRW-S: Kolmogorov, PAMI 2006)

Messages m only move cost between nodes and edges: for every choice x, whatever the messages,

    cost(x) = sum over nodes s of here[s](x_s) + sum over edges st of (pair - m[s->t] - m[t->s])(x_s, x_t),
    here[s] = cost[s] + sum of the messages into s.

A sweep takes nodes in order. Node s lends each edge that leads on the share 1 / max(edges back, edges on) of here[s]
above its least, and sets the message along it so that what the edge then holds is nowhere below its least, which is a
number. Nothing is left below zero, so that the leasts of nodes and edges add up to a bound; over sweeps to and fro it
never falls.

Rounding. Each least is taken over sums of a few terms. Its error is below eps times the number of terms times the
largest sum of their magnitudes, and the sweep adds these up: bound - rounding is proved in floating point as well.
"""

from typing import NamedTuple

import numpy as np

from autopar.search.compiled import compiled
from autopar.search.pairwise.problem import Floats, Ints, Pairwise, starts

EPS = float(np.finfo(np.float64).eps)


class NeighbourLayout(NamedTuple):
    """Half-edges of node s: first_half[s]:middle[s] to nodes before it, middle[s]:first_half[s + 1] to later ones.

    Half-edge h leads to other[h], twin[h] leads back. Its pairs are block[first_block[h] + i * (options there) + j] for
    option i here and j there; what it says to option j there is messages[first_message[h] + j].
    """

    first_option: Ints
    first_half: Ints
    middle: Ints
    other: Ints
    twin: Ints
    edge: Ints
    first_block: Ints
    block: Floats
    largest: Floats
    """Of the magnitudes of a half-edge's finite pairs."""
    first_message: Ints


def lay(problem: Pairwise) -> NeighbourLayout:
    num, edges = problem.num_options(), problem.num_edges
    owner = np.concatenate([problem.edge_a, problem.edge_b])
    other = np.concatenate([problem.edge_b, problem.edge_a])
    edge = np.tile(np.arange(edges, dtype=np.int64), 2)
    order = np.lexsort((other, owner))
    place = np.empty(2 * edges, np.int64)
    place[order] = np.arange(2 * edges)
    owner, other, edge = owner[order], other[order], edge[order]
    first_half = starts(np.bincount(owner, minlength=problem.num_nodes))
    first_block = starts(num[owner] * num[other])
    block, largest = np.empty(int(first_block[-1])), np.zeros(2 * edges)
    turned = owner == problem.edge_b[edge]
    _fill(problem.pair_cost, problem.first_pair, edge, turned, num[owner], num[other], block, largest)
    return NeighbourLayout(
        first_option=problem.first_option,
        first_half=first_half,
        middle=first_half[:-1] + np.bincount(owner[other < owner], minlength=problem.num_nodes),
        other=other,
        twin=place[np.where(order < edges, order + edges, order - edges)],
        edge=edge,
        first_block=first_block,
        block=block,
        largest=largest,
        first_message=starts(num[other]),
    )


@compiled
def _fill(
    pairs: Floats, first_pair: Ints, edge: Ints, turned: Ints, rows: Ints, columns: Ints, block: Floats, largest: Floats
) -> None:
    at = 0
    for h in range(len(edge)):
        first = first_pair[edge[h]]
        for i in range(rows[h]):
            for j in range(columns[h]):
                value = pairs[first + (j * rows[h] + i if turned[h] else i * columns[h] + j)]
                block[at] = value
                at += 1
                if value < np.inf:
                    largest[h] = max(largest[h], abs(value))


@compiled
def gather(layout: NeighbourLayout, unary: Floats, messages: Floats, s: int, here: Floats) -> float:
    """Fill `here` with what option costs and messages make of node s; returns the largest sum of magnitudes."""
    first = layout.first_option[s]
    size = layout.first_option[s + 1] - first
    magnitude = np.abs(unary[first : first + size])
    here[:size] = unary[first : first + size]
    for h in range(layout.first_half[s], layout.first_half[s + 1]):
        into = layout.first_message[layout.twin[h]]
        for i in range(size):
            here[i] += messages[into + i]
            magnitude[i] += abs(messages[into + i])
    largest = 0.0
    for i in range(size):
        if magnitude[i] < np.inf:
            largest = max(largest, magnitude[i])
    return largest


@compiled
def send(layout: NeighbourLayout, messages: Floats, h: int, lent: Floats, rows: int, share: float) -> float:
    """Set the message along h of a node that lends `share` of `lent`; returns the edge's least, left out of it."""
    columns = layout.first_message[h + 1] - layout.first_message[h]
    said = messages[layout.first_message[h] : layout.first_message[h] + columns]
    heard = layout.first_message[layout.twin[h]]
    said[:] = np.inf
    for i in range(rows):
        if lent[i] < np.inf:
            value = share * lent[i] - messages[heard + i]
            row = layout.block[layout.first_block[h] + i * columns : layout.first_block[h] + (i + 1) * columns]
            for j in range(columns):
                new = value + row[j]
                said[j] = new if new < said[j] else said[j]
    least = np.inf
    for j in range(columns):
        least = min(least, said[j])
    if least < np.inf:
        for j in range(columns):
            said[j] -= least
    return least


@compiled
def sweep(
    layout: NeighbourLayout, unary: Floats, messages: Floats, onward: bool, temperature: float, weight: Floats
) -> tuple[float, float]:
    """One sweep over all nodes, on or back: (bound, rounding); the bound is inf where no choice is allowed.

    At a positive temperature `weight` becomes how much each option is wanted, exp(-(here - least) / temperature), the
    sum over a node 1: where options tie, a direction for memory prices that does not jump from one to the other.
    """
    nodes = len(layout.first_option) - 1
    here = np.empty(_most_options(layout))
    bound = rounding = total = 0.0
    for k in range(nodes):
        s = k if onward else nodes - 1 - k
        first = layout.first_option[s]
        size = layout.first_option[s + 1] - first
        largest = gather(layout, unary, messages, s, here)
        least = np.inf
        for i in range(size):
            least = min(least, here[i])
        if least == np.inf:
            return np.inf, 0.0
        bound += least
        total += abs(least)
        for i in range(size):
            here[i] -= least
        if temperature > 0.0:
            wanted = 0.0
            for i in range(size):
                weight[first + i] = np.exp(-here[i] / temperature)
                wanted += weight[first + i]
            for i in range(size):
                weight[first + i] /= wanted
        begin, middle, end = layout.first_half[s], layout.middle[s], layout.first_half[s + 1]
        share = 1.0 / max(middle - begin, end - middle, 1)
        rounding += (end - begin + 2) * largest
        for h in range(middle if onward else begin, end if onward else middle):
            least = send(layout, messages, h, here, size, share)
            if least == np.inf:
                return np.inf, 0.0
            bound += least
            total += abs(least)
            rounding += (end - begin + 6) * (2.0 * largest + layout.largest[h])
    return bound, EPS * (rounding + (nodes + len(layout.other)) * total)


@compiled
def _most_options(layout: NeighbourLayout) -> int:
    most = 1
    for s in range(len(layout.first_option) - 1):
        most = max(most, layout.first_option[s + 1] - layout.first_option[s])
    return int(most)


@compiled
def close_pairs(layout: NeighbourLayout, first_pair: Ints, edge_a: Ints, pair: Floats) -> None:
    """Allow no longer, in both directions, the pairs that are inf."""
    for s in range(len(layout.first_option) - 1):
        size = layout.first_option[s + 1] - layout.first_option[s]
        for h in range(layout.first_half[s], layout.first_half[s + 1]):
            at, columns = layout.first_block[h], layout.first_message[h + 1] - layout.first_message[h]
            first, straight = first_pair[layout.edge[h]], edge_a[layout.edge[h]] == s
            for i in range(size):
                for j in range(columns):
                    if pair[first + (i * columns + j if straight else j * size + i)] == np.inf:
                        layout.block[at + i * columns + j] = np.inf


@compiled
def leave(
    layout: NeighbourLayout,
    unary: Floats,
    messages: Floats,
    first_pair: Ints,
    edge_a: Ints,
    option: Floats,
    pair: Floats,
) -> float:
    """After a sweep back: fill in what is left at options and pairs, none below zero; returns the rest, the bound."""
    nodes = len(layout.first_option) - 1
    here = np.empty(_most_options(layout))
    bound = 0.0
    for s in range(nodes):
        first = layout.first_option[s]
        size = layout.first_option[s + 1] - first
        gather(layout, unary, messages, s, here)
        least = here[:size].min()
        here[:size] -= least
        bound += least
        begin, middle, end = layout.first_half[s], layout.middle[s], layout.first_half[s + 1]
        share = 1.0 / max(middle - begin, end - middle, 1)
        for i in range(size):
            option[first + i] = (1.0 - share * (middle - begin)) * here[i] if here[i] < np.inf else np.inf
        for h in range(begin, middle):
            columns = layout.first_message[h + 1] - layout.first_message[h]
            into = layout.first_message[layout.twin[h]]
            straight = edge_a[layout.edge[h]] == s
            origin = first_pair[layout.edge[h]]
            least = np.inf
            for turn in range(2):
                for i in range(size):
                    for j in range(columns):
                        at = origin + (i * columns + j if straight else j * size + i)
                        if turn == 1:
                            pair[at] = max(pair[at] - least, 0.0)
                        elif here[i] < np.inf and layout.block[layout.first_block[h] + i * columns + j] < np.inf:
                            pair[at] = share * here[i] + layout.block[layout.first_block[h] + i * columns + j]
                            pair[at] -= messages[into + i] + messages[layout.first_message[h] + j]
                            least = min(least, pair[at])
                        else:
                            pair[at] = np.inf
            bound += least
    return bound


@compiled
def decode(layout: NeighbourLayout, unary: Floats, messages: Floats, choice: Ints) -> None:
    """After a sweep back: take nodes in order, each by its pairs with those before and what those after say of it
    (Kolmogorov 2006, section 4.4): where messages agree, the best choice at these costs."""
    nodes = len(layout.first_option) - 1
    here = np.empty(_most_options(layout))
    for s in range(nodes):
        first = layout.first_option[s]
        size = layout.first_option[s + 1] - first
        here[:size] = unary[first : first + size]
        for h in range(layout.middle[s], layout.first_half[s + 1]):
            into = layout.first_message[layout.twin[h]]
            for i in range(size):
                here[i] += messages[into + i]
        for h in range(layout.first_half[s], layout.middle[s]):
            columns = layout.first_message[h + 1] - layout.first_message[h]
            row = layout.first_block[h] + choice[layout.other[h]]
            for i in range(size):
                here[i] += layout.block[row + i * columns]
        choice[s] = np.argmin(here[:size])
