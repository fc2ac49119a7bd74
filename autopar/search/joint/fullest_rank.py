"""Which rank of a pipeline may hold most, and in which passes?

With more micro-batches than fill the pipeline the first rank has most in flight; with fewer all have the same number,
and the one with most blocks holds most. What it holds grows with what it keeps for backward and with the gradients that
are there. While a pipeline fills it keeps more and more and has no gradients; with more micro-batches than that takes
it keeps as much again later, with all gradients, and that pass is its fullest; with fewer, gradients come as what is
kept goes. Of its passes forward, and of those back, which hold what is run again too, those are taken beyond which no
other keeps more, has more gradients, or has more of a mixture of the two: corners of a hull. Blocks of ops count alike
here; memory is then limited in the passes taken of the rank taken, and any choice of them is sound; another rank, which
has a head beside blocks, is taken too where that turns out to hold more. Messages count
besides, as small as they can be: what they are received in, of all micro-batches, and where a schedule waits for what
it sent at the end of the step, what was sent by then (`search.staged.staged_memory`).
"""

from collections.abc import Sequence
from operator import add, mul

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.schedules import NUMBERS, Action, PipelineOrder, make_order
from autopar.lower.program import Program
from autopar.search.costs.paid import stages_of
from autopar.search.graph.moments import Share
from autopar.search.joint.messages import crossing, least_messages
from autopar.search.staged.rounds import dealt
from autopar.search.staged.staged_memory import WAITS_AT_END
from autopar.search.staged.stages import start_positions

Fill = tuple[tuple[int, ...], int, tuple[bool, ...]]
"""Of a rank: micro-batches kept of each of its stages beside the one at hand, the number of that which is passed among
them, and which had a backward pass."""


def fullest_share(
    program: Program,
    num_devices: int,
    schedule: str,
    pipeline: int,
    chunks: int,
    begins: Sequence[int],
    others: Sequence[int] = (),
) -> Share:
    """The fullest rank's, of stages whose blocks are dealt evenly and that begin at these positions of ops.

    num_devices: of a stage. schedule: one whose backward has one part. others: ranks whose passes are taken too. All
    meshes of so many devices have one.
    """
    asked = (num_devices, schedule, pipeline, chunks, tuple(begins), tuple(others))
    known: dict[object, Share] = program.made.setdefault(("fullest shares", program.microbatches), {})
    if asked not in known:
        known[asked] = _fullest_share(program, *asked)
    return known[asked]


def _fullest_share(
    program: Program,
    num_devices: int,
    schedule: str,
    pipeline: int,
    chunks: int,
    begins: tuple[int, ...],
    others: tuple[int, ...],
) -> Share:
    order = make_order(schedule, pipeline, program.microbatches, chunks)
    p, num_ops = len(order.ranks), len(program.ops)
    stage = stages_of(begins, num_ops)
    sizes = dealt(len(start_positions(program)) + 1, p, order.num_stages // p)
    most = most_kept(order, sizes)
    blocks = [0, *start_positions(program)]
    ends = [*begins, num_ops]
    cuts = crossing(program, begins)
    own = [[name for name in names if stage[_producer(program, name)] == number] for number, names in enumerate(cuts)]
    back = [0.0, *least_messages(program, num_devices, cuts)]  # what a stage receives, and sends back
    ahead = [*least_messages(program, num_devices, own), 0.0]  # what it sends, and receives back
    ranks = dict.fromkeys([most.index(max(most)), *others])
    every = {rank: _passes(order.ranks[rank], p, order.num_stages // p) for rank in ranks}
    taken = [
        (rank, fill)
        for rank in ranks
        for fill in _fullest(every[rank], sizes[rank::p], order.num_stages // p - 1 if rank == p - 1 else None)
    ]
    passed = [rank + p * fill[1] for rank, fill in taken]

    def of_stages(rank: int, own: Sequence[float]) -> NDArray[np.float64]:
        """What a rank's stages have, for all."""
        found = np.zeros(order.num_stages)
        found[rank::p] = own
        return found

    return Share(
        ranks=tuple(ranks),
        ops=np.array([stage % p == rank for rank, _ in taken]),
        at_hand=np.array([np.where(stage == number, 1.0, 0.0) for number in passed]),
        beside=np.array([of_stages(rank, fill[0]) for rank, fill in taken])[:, stage],
        begun=np.array([of_stages(rank, fill[2]) > 0.0 for rank, fill in taken])[:, stage],
        last=tuple(slice(max(b for b in blocks if b < ends[number]), ends[number]) for number in passed),
        kinds=tuple("".join(sorted(every[rank][fill][0], reverse=True)) for rank, fill in taken),
        sent=tuple(
            sum(map(mul, every[rank][fill][1], map(add, ahead[rank::p], back[rank::p])))
            if schedule in WAITS_AT_END
            else 0.0
            for rank, fill in taken
        ),
        received=tuple(
            program.microbatches * sum(back[n] + ahead[n] for n in range(rank, order.num_stages, p))
            for rank, _ in taken
        ),
    )


def most_kept(order: PipelineOrder, sizes: Sequence[int]) -> list[int]:
    """Blocks that each rank keeps at most, as often as of micro-batches, that at hand included; sizes: of stages."""
    table = order.table
    blocks, is_back = np.asarray(sizes)[table.stage], table.kind == NUMBERS["B"]
    kept = np.where(is_back, -blocks, blocks).cumsum() + np.where(is_back, blocks, 0)  # all is gone at a rank's end
    firsts = np.searchsorted(table.rank, np.arange(len(order.ranks)))
    return [int(most) for most in np.maximum.reduceat(kept, firsts)]


def _fullest(
    passes: dict[Fill, tuple[set[str], tuple[int, ...]]], sizes: Sequence[int], last: int | None
) -> list[Fill]:
    """Corners of a rank's passes, forward and back; and of those through the last stage, if it is the rank's."""
    amounts = {fill: (_kept(fill, sizes), sum(map(mul, fill[2], sizes))) for fill in passes}
    found = [f for kind in "FB" for f in _corners({f: n for f, n in amounts.items() if kind in passes[f][0]})]
    found += _corners({f: n for f, n in amounts.items() if "B" in passes[f][0] and f[1] == last})
    return list(dict.fromkeys(found))


def _producer(program: Program, name: str) -> int:
    producer = program.tensors[name].producer
    assert producer is not None
    return producer


def _passes(actions: Sequence[Action], num_ranks: int, num_stages: int) -> dict[Fill, tuple[set[str], tuple[int, ...]]]:
    """How full a rank is in its passes, of what kinds they are, and backward passes of each stage before the last.

    num_stages: of the rank, every `num_ranks`th of all.
    """
    kept, done = [0] * num_stages, [0] * num_stages
    out: dict[Fill, tuple[set[str], tuple[int, ...]]] = {}
    for action in actions:
        stage = action.stage // num_ranks
        if action.kind == "B":
            kept[stage] -= 1
        fill = tuple(kept), stage, tuple(number > 0 for number in done)
        out[fill] = {action.kind} | (out[fill][0] if fill in out else set()), tuple(done)
        if action.kind == "F":
            kept[stage] += 1
        done[stage] += action.kind == "B"
    return out


def _kept(fill: Fill, sizes: Sequence[int]) -> int:
    """Blocks that are kept, as often as of micro-batches, the one at hand included."""
    others: int = sum(map(mul, fill[0], sizes))
    return others + sizes[fill[1]]


def _corners(amounts: dict[Fill, tuple[int, int]]) -> list[Fill]:
    """Of (kept, gradients) the corners of the hull where both are large, most kept first; of equals the last stage."""
    corners: list[Fill] = []
    for fill in sorted(amounts, key=lambda fill: (*amounts[fill], fill[1]), reverse=True):
        kept, gradients = amounts[fill]
        if corners and gradients <= amounts[corners[-1]][1]:
            continue
        while len(corners) > 1:
            (a, u), (b, v) = amounts[corners[-2]], amounts[corners[-1]]
            if (a - b) * (gradients - u) < (a - kept) * (v - u):  # above the line
                break
            corners.pop()
        corners.append(fill)
    return corners
