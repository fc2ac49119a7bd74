"""What algorithms send, counted on the algorithms themselves: blocks passed between ranks until every rank has its own.

A rank's blocks are sets of (source, block); the counts must give the factors that `cost_models.algorithms` writes down,
and what is sent is what is received.
"""

import itertools
from collections import Counter
from collections.abc import Iterator

import pytest

from autopar.cost_models.collectives import algorithms, wire_bytes
from tests.link_cases import depth_of, one_level, two_levels

Message = tuple[int, int, int]
"""Sender, receiver, blocks; a block is an n-th of the tensor."""


def ring_all_gather(n: int) -> Iterator[list[Message]]:
    """Blocks are followed for real: rank r starts with block r and must end with all of them."""
    held = [{rank} for rank in range(n)]
    for step in range(n - 1):
        moves = [(rank, (rank + 1) % n, (rank - step) % n) for rank in range(n)]
        assert all(block in held[sender] for sender, _, block in moves)
        for _, receiver, block in moves:
            held[receiver].add(block)
        yield [(sender, receiver, 1) for sender, receiver, _ in moves]
    assert all(blocks == set(range(n)) for blocks in held)


def recursive_doubling_all_gather(n: int) -> Iterator[list[Message]]:
    held = [{rank} for rank in range(n)]
    for bit in range(depth_of(n)):
        before = [set(blocks) for blocks in held]
        for rank in range(n):
            held[rank] |= before[rank ^ 1 << bit]
        yield [(rank, rank ^ 1 << bit, len(before[rank])) for rank in range(n)]
    assert all(blocks == set(range(n)) for blocks in held)


def pairwise_all_to_all(n: int) -> Iterator[list[Message]]:
    held = [{(rank, rank)} for rank in range(n)]
    for step in range(1, n):
        for rank in range(n):
            held[(rank + step) % n].add((rank, (rank + step) % n))
        yield [(rank, (rank + step) % n, 1) for rank in range(n)]
    assert all(held[rank] == {(source, rank) for source in range(n)} for rank in range(n))


def bruck_all_to_all(n: int) -> Iterator[list[Message]]:
    """Blocks travel the set bits of their distance, as many together as have that bit."""
    place = {(source, to): source for source in range(n) for to in range(n)}
    for bit in range(depth_of(n)):
        moving = [pair for pair in place if (pair[1] - pair[0]) % n >> bit & 1]
        sent = Counter((place[pair], (place[pair] + (1 << bit)) % n) for pair in moving)
        for pair in moving:
            place[pair] = (place[pair] + (1 << bit)) % n
        yield [(sender, receiver, count) for (sender, receiver), count in sent.items()]
    assert all(place[pair] == pair[1] for pair in place)


def binomial_scatter(n: int) -> Iterator[list[Message]]:
    """Each holder of a range hands its upper part on; ranges are halved at powers of two."""
    ranges = {0: (0, n)}
    for bit in reversed(range(depth_of(n))):
        moves = []
        for rank, (low, high) in list(ranges.items()):
            middle = low + (1 << bit)
            if middle < high:
                ranges[rank], ranges[middle] = (low, middle), (middle, high)
                moves.append((rank, middle, high - middle))
        yield moves
    assert ranges == {rank: (rank, rank + 1) for rank in range(n)}


SIMULATED = {
    ("all_gather", "ring"): ring_all_gather,
    ("all_gather", "halving_doubling"): recursive_doubling_all_gather,
    ("all_to_all", "pairwise"): pairwise_all_to_all,
    ("all_to_all", "bruck"): bruck_all_to_all,
    ("scatter", "binomial"): binomial_scatter,
}


CASES = [
    (kind, name, n)
    for kind, name in SIMULATED
    for n in (2, 3, 4, 7, 8, 16)
    if name != "halving_doubling" or n == 1 << depth_of(n)
]


@pytest.mark.parametrize(("kind", "name", "n"), CASES)
def test_steps_and_bytes_of_the_closed_form_are_those_of_the_algorithm(kind: str, name: str, n: int) -> None:
    steps = list(SIMULATED[kind, name](n))
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for sender, receiver, blocks in itertools.chain.from_iterable(steps):
        sent[sender] += blocks
        received[receiver] += blocks
    assert sent.total() == received.total()
    busiest = max(sent.values()) / n
    (form,) = [one for one in algorithms(kind, one_level(n, alpha=1.0, bandwidth=1.0)) if one.algorithm == name]
    assert form.alpha_seconds == len(steps)
    if name == "bruck" and n & (n - 1):
        assert busiest <= form.seconds_per_byte, "half of the blocks move in a step, or fewer"
    else:
        assert form.seconds_per_byte == pytest.approx(busiest)
    if name != "bruck":
        assert busiest == pytest.approx(wire_bytes(kind, 1.0, n))


def binary_tree(rank: int, n: int) -> tuple[int | None, list[int]]:
    """Parent and children of a rank in NCCL's in-order binary tree (github NVIDIA/nccl src/graph/trees.cc)."""
    if rank == 0:
        return None, [1 << (depth_of(n) - 1)] if n > 1 else []
    bit = rank & -rank
    parent = (rank ^ bit) | bit << 1
    parent = parent if parent < n else rank ^ bit
    children = [rank - (bit >> 1)] if bit > 1 else []
    low = bit >> 1
    while low and rank + low >= n:
        low >>= 1
    return parent, children + ([rank + low] if low else [])


@pytest.mark.parametrize("n", [*range(2, 35), 64, 100])
def test_a_double_binary_tree_sends_what_its_form_says(n: int) -> None:
    """Half of the tensor on each of two trees, the second mirrored (n even) or shifted by one (n odd): every rank sends
    it up once and down to each child."""
    sent = [0.0] * n
    for second in (False, True):
        place = [((rank + 1) % n if n % 2 else n - 1 - rank) if second else rank for rank in range(n)]
        for rank in range(n):
            parent, children = binary_tree(rank, n)
            if parent is not None:
                assert rank in binary_tree(parent, n)[1], "parents know their children"
            sent[place[rank]] += 0.5 * ((parent is not None) + len(children))
    assert sum(sent) == pytest.approx(2 * (n - 1)), "up and down every edge of a tree, half of the tensor, two trees"
    (form,) = [
        one for one in algorithms("all_reduce", one_level(n, alpha=0.0, bandwidth=1.0)) if one.algorithm == "tree"
    ]
    assert max(sent) == pytest.approx(form.seconds_per_byte)


@pytest.mark.parametrize("m", [2, 3, 4, 8])
def test_a_switch_that_reduces_carries_the_tensor_once_and_a_share(m: int) -> None:
    """Rank r reads its m-th part, which every rank sends into the switch, and stores the sum to all by multicast."""
    up, down = Counter[int](), Counter[int]()
    for reader in range(m):
        up.update(dict.fromkeys(range(m), 1))  # the part of every rank goes up to be summed
        down[reader] += 1  # the sum
        up[reader] += 1  # stored once
        down.update(dict.fromkeys(range(m), 1))  # to all
    assert set(up.values()) == set(down.values()) == {m + 1}
    (form,) = [one for one in algorithms("all_reduce", two_levels(1, m)) if one.algorithm == "in_network"]
    assert form.seconds_per_byte == pytest.approx((m + 1) / m / 8e9)
