"""What does a pipeline's step take at least, whatever its stages decide? The length of one way through it.

The order of a schedule is a graph of actions and messages, and a step takes as long as its longest way at least, for
every plan. So any way bounds them all: the sum of what its actions take, minimised over all choices. The way of a plan
at hand is its own longest, so that the bound is near the plan where others decide alike; before there is one, that of
stages which take what their work takes is near it:

    sum over stages j of F_j f_j + B_j b_j + messages x least message + what is paid once a step on one rank

with F_j and B_j the actions of stage j on the way, and f_j and b_j their seconds. The least message has no byte more
than an even share of what crosses the cut.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.cost_models.collectives import Form, least
from autopar.cost_models.pipeline import COMPUTE, Pipeline, Segment, StageWork, make_pipeline
from autopar.cost_models.schedules import PipelineOrder
from autopar.cost_models.timeline_kernel import longest_paths
from autopar.errors import InfeasibleError, SearchTimeoutError
from autopar.lower.program import Program
from autopar.search.costs.paid import Paid, reading_stages, stages_of
from autopar.search.costs.pricing import Pricer
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.exact.limited_bound import least_within
from autopar.search.exact.relaxation import least_seconds
from autopar.search.exact.under_limit import UnderLimit
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.moments import Counting, Share
from autopar.search.joint.messages import crossing, least_messages
from autopar.search.search_options import SearchAim

GAP = 2e-3
SECONDS = 15.0
"""How exactly, and how long at most, a way is searched within the limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CriticalWay:
    """forward, backward: how often the way leads through each stage. rank: that pays most once a step.

    sent: seconds of the messages on the way, each the least that it can be. share: of the fullest rank. begins:
    positions of the ops with which stages after the first begin.
    """

    forward: NDArray[np.float64]
    backward: NDArray[np.float64]
    rank: int
    sent: float
    share: Share
    begins: tuple[int, ...]
    num_ranks: int


def longest_way(pipeline: Pipeline, num_stages: int) -> tuple[NDArray[np.float64], int]:
    """Of a pipeline whose actions are one task each: how often its longest way passes each stage, forward (row 0) and
    back (row 1), and how many messages are on it."""
    tasks, actions = pipeline.tasks, [action for actions in pipeline.order.ranks for action in actions]
    finish, _ = longest_paths(tasks.seconds, tasks.before, tasks.after)
    by_end = np.argsort(tasks.after, kind="stable")
    first = np.searchsorted(tasks.after[by_end], np.arange(len(tasks) + 1))
    counts = np.zeros((2, num_stages))
    messages, task = 0, int(finish.argmax())
    while True:
        if task < len(actions):
            counts[0 if actions[task].kind == "F" else 1, actions[task].stage] += 1
        else:
            messages += 1
        before = tasks.before[by_end[first[task] : first[task + 1]]]
        if not len(before):
            return counts, messages
        task = int(before[finish[before].argmax()])


def way_seconds(
    program: Program,
    pricer: Pricer,
    way: CriticalWay,
    fold: bool,
    *,
    limit: float | None = None,
    asked: SearchAim | None = None,
    seconds: float = SECONDS,
    exact: bool = False,
) -> float:
    """The least that a step takes on that way, memory aside; with a limit, of what fits in so many bytes of the fullest
    rank, recompute allowed.

    seconds: of climbing prices of memory, or solving.
    exact: of choices, not of their relaxation.
    """
    ranks = np.arange(len(way.forward)) % way.num_ranks
    paid = Paid(
        stage_of=stages_of(way.begins, len(program.ops)),
        forward=way.forward,
        backward=way.backward,
        once=np.where(ranks == way.rank, 1.0, 0.0),
    )
    if limit is None:
        graph = build(program, pricer, limit=None, fold=fold, counted=Counting(paid=paid)).graph
        return least_seconds(graph) + way.sent
    asked = asked or SearchAim()
    cutoff = asked.cutoff - way.sent
    counted = Counting(share=way.share, paid=paid)
    graph = build(program, pricer, limit=limit, fold=fold, builder=RecomputeBuilder, counted=counted).graph
    if not exact:
        return least_within(graph, cutoff=cutoff, seconds=seconds, prices=asked.prices) + way.sent
    try:
        found = solve(
            graph,
            relative_gap=GAP,
            seconds=seconds,
            cutoff=cutoff,
            under=UnderLimit(binds=True, say_least=False, prices=asked.prices),
        )
    except CutoffError as error:
        return error.bound + way.sent
    except InfeasibleError:
        return math.inf
    except SearchTimeoutError:
        return 0.0
    return found.bound + way.sent


def guessed_way(
    program: Program,
    pricer: Pricer,
    work: NDArray[np.float64],
    order: PipelineOrder,
    begins: Sequence[int],
    share: Share,
    send: tuple[Form, ...],
) -> CriticalWay:
    """The longest way where no plan is at hand: of stages that take what their work takes, split evenly.

    work: seconds of each op's forward and backward, [ops, 2].
    """
    num_stages, stage_of = len(begins) + 1, stages_of(begins, len(program.ops))
    seconds = np.stack([np.bincount(stage_of, weights=side, minlength=num_stages) for side in work.T], axis=1)
    sent = least(send, min(least_messages(program, pricer.mesh.size, crossing(program, begins))))[0]
    stages = [
        StageWork(
            actions={"F": (Segment(COMPUTE, float(f)),), "B": (Segment(COMPUTE, float(b)),)},
            send_forward=sent,
            send_backward=sent,
        )
        for f, b in seconds
    ]
    passes, messages = longest_way(make_pipeline(order, stages), num_stages)
    p = len(order.ranks)
    stored = np.zeros(num_stages)
    for name, tensor in program.tensors.items():
        if tensor.kind == "parameter":
            stored[reading_stages(program, stage_of, name)] += math.prod(tensor.shape)
    return CriticalWay(
        forward=passes[0],
        backward=passes[1],
        rank=int(np.argmax(np.bincount(np.arange(num_stages) % p, weights=stored))),
        sent=messages * sent,
        share=share,
        begins=tuple(begins),
        num_ranks=p,
    )
