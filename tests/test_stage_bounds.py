"""What stages take at least and what they hold: bounds are below every plan, rows of one rank are part of a whole."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from autopar.cost_models.pipeline import COMPUTE, Segment, StageWork, make_pipeline
from autopar.cost_models.schedules import Action, make_order
from autopar.cost_models.timeline import simulate
from autopar.errors import InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.search.costs.folding import fold_program
from autopar.search.costs.paid import stages_of
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.ilp import CutoffError, solve
from autopar.search.exact.relaxation import least_seconds
from autopar.search.find_exactly import Exact
from autopar.search.graph.build import build
from autopar.search.graph.moments import Counting, Share
from autopar.search.graph.strategy_graph import usage
from autopar.search.joint.best_staged import best_staged, way_before_planning
from autopar.search.joint.candidates import Candidate
from autopar.search.joint.critical_path import GAP, way_seconds
from autopar.search.joint.fullest_rank import fullest_share, most_kept
from autopar.search.known.baselines import memory_limit
from autopar.search.known.random_plan import random_plan
from autopar.search.meshes import Arrangement, parts
from autopar.search.planner import plan_rank
from autopar.search.search_options import SearchAim, SearchOptions
from autopar.search.staged.rounds import dealt, interleaved_rounds, least_uneven, rounds
from autopar.search.staged.stages import even_cuts, even_starts, priced, simulated, staged, starts_of
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.train_config import TrainConfig
from tests import brute_force
from tests.search_cases import machine, small_llama
from tests.strategy_graphs import random_graph

LAYERS, MICROBATCHES = 4, 4
COUNTED = 0.04
"""How much more the strategy graph, op by op, may count of a tiny model than is held, call by call."""


def graph(microbatches: int = MICROBATCHES) -> CapturedModel:
    return small_llama(LAYERS, 8, microbatches)


@cache
def program(microbatches: int = MICROBATCHES) -> Program:
    return make_program(graph(microbatches))


def _whole(own: Pricer, share: Share, _: bool = False, microbatches: int = MICROBATCHES) -> Exact:
    """Blocks alike: no mixture of two plans."""
    return plan_rank(program(microbatches), own, share, SearchOptions(relative_gap=1e-3), SearchAim(), mixes=False)


def key(schedule: str, chunks: int, microbatches: int = MICROBATCHES, devices: int = 4) -> Candidate:
    """Two pipeline ranks."""
    arrangement = Arrangement(pipeline=2, cluster=parts(machine(devices))[2], mesh=make_mesh((devices // 2,)))
    return Candidate(arrangement=arrangement, microbatches=microbatches, schedule=schedule, chunks=chunks)


def pricer() -> Pricer:
    return make_pricer(mesh=make_mesh((2,)), cluster=parts(machine(4))[2], config=TrainConfig())


@pytest.mark.parametrize("num_blocks", [4, 7, 30, 126])
def test_blocks_are_dealt_evenly(num_blocks: int) -> None:
    for p in (2, 3, 4, 8):
        for chunks in (1, 2, 4):
            if p * chunks <= num_blocks:
                sizes = dealt(num_blocks, p, chunks)
                held = [sum(sizes[rank::p]) for rank in range(p)]
                assert sum(sizes) == num_blocks and len(sizes) == p * chunks
                assert max(sizes) - min(sizes) <= 1 and max(held) - min(held) <= 1
                assert held[-1] == min(held)


@pytest.mark.parametrize(("p", "chunks", "m"), [(2, 2, 2), (2, 2, 4), (2, 1, 4), (4, 1, 4), (4, 1, 8), (3, 1, 6)])
def test_no_seconds_of_folded_ops_beat_the_rounds_of_interleaved_stages(p: int, chunks: int, m: int) -> None:
    """Random seconds of each class of ops forward and back, and of each kind of parameter once a step."""
    folding = fold_program(program())
    begins = even_starts(program(), p, chunks)
    stage_of = stages_of(begins, len(program().ops))
    order = make_order("interleaved-1f1b" if chunks > 1 else "1f1b", p, m, chunks)
    bound = interleaved_rounds(program(), folding, begins, p, m, (1.0, 1.0))
    assert m - 1e-6 <= bound.passing <= m + p - 1 and 0.98 * (1 - 1e-6) <= bound.once <= 1
    draw, nearest = random.Random(0), np.inf
    for _ in range(60):
        spread = draw.choice((0.0, 1.0, 3.0))
        seconds = [[np.exp(draw.gauss(0, spread)) for _ in folding.instances] for _ in range(2)]
        own = np.zeros((2, p * chunks))
        for number, positions in enumerate(folding.instances):
            for position in positions:
                own[:, stage_of[position]] += [side[number] for side in seconds]
        once = np.zeros(p)
        paid = 0.0
        for names in folding.travellers:
            if program().tensors[names[0]].kind == "parameter":
                each = draw.random()
                paid += each * len(names)
                for name in names:
                    for stage in {int(stage_of[position]) for position, _ in program().readers[name]}:
                        once[stage % p] += each
        works = [
            StageWork(actions={"F": (Segment(COMPUTE, f),), "B": (Segment(COMPUTE, b),)})
            for f, b in zip(*own, strict=True)
        ]
        step = float(simulate(make_pipeline(order, works).tasks).finish.max()) + float(once.max())
        least = (bound.passing * own.sum() + bound.once * paid) / p
        assert step >= least * (1 - 1e-9)
        nearest = min(nearest, step / least)
    assert nearest < 1.5  # it says something


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 3), (3, 2), (3, 3), (3, 8), (4, 5), (4, 12)])
def test_no_cut_between_blocks_beats_the_least_of_uneven_stages(schedule: str, p: int, m: int) -> None:
    """Every cut of a few blocks of random seconds, each simulated; never below the even share of the same work."""
    draw, order, nearest = random.Random(0), make_order(schedule, p, m, 1), np.inf
    for _ in range(12):
        forward, backward = (np.array([draw.choice((1.0, draw.random() * 3)) for _ in range(6)]) for _ in range(2))
        steps = []
        for cuts in combinations(range(1, 6), p - 1):
            sides = (np.add.reduceat(side, [0, *cuts]) for side in (forward, backward))
            works = [
                StageWork(actions={"F": (Segment(COMPUTE, f),), "B": (Segment(COMPUTE, b),)})
                for f, b in zip(*sides, strict=True)
            ]
            steps.append(float(simulate(make_pipeline(order, works).tasks).finish.max()))
        both = forward + backward
        least = least_uneven(both, schedule, p, m)
        assert min(steps) >= least * (1 - 1e-9)
        even = rounds(schedule, p, m).passing * both.sum() / p
        assert min(steps) >= even * (1 - 1e-9)
        nearest = min(nearest, min(steps) / max(least, even))
    assert nearest < 1.35 and least_uneven(np.ones(p - 1), schedule, p, m) == np.inf
    assert m < p or nearest < 1.1


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2), ("gpipe", 1)])
def test_no_plan_takes_less_than_a_way_through_its_step(schedule: str, chunks: int) -> None:
    """The way is that of the best plan, which it bounds closely; and no random plan in the same stages is below it."""
    cluster = machine(4)

    found = best_staged(program(), pricer(), cluster, key(schedule, chunks), _whole)
    assert found.plan is not None
    way = found.way
    guessed = way_before_planning(program(), pricer(), cluster, key(schedule, chunks))
    before = way_seconds(program(), pricer(), guessed, False)
    least = way_seconds(program(), pricer(), way, False)
    folded = way_seconds(program(), pricer(), way, True)
    assert least <= folded * (1 + 1e-6)
    cuts, rng = even_cuts(program(), 2, chunks), random.Random(1)
    seen = []
    for _ in range(12):
        drawn = random_plan(graph(), make_mesh((2,)), rng)
        made, stages = staged(drawn, program(), pricer(), 2, schedule, cuts)
        seen.append(priced(made, stages, cluster, pricer().cluster).estimate.step_seconds)
    assert min(seen) >= max(least, before)
    assert way_seconds(program(), pricer(), guessed, True) >= 0.8 * found.plan.estimate.step_seconds
    if found.plan.cuts == cuts:
        assert folded <= found.plan.estimate.step_seconds * (1 + 1e-9)
    assert folded >= 0.9 * found.plan.estimate.step_seconds
    within = way_seconds(program(), pricer(), way, True, limit=1e12)
    assert within >= folded * (1 - 1e-3)
    assert way_seconds(program(), pricer(), way, True, limit=1.0) == np.inf


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved-1f1b", 2)])
def test_a_way_counts_forward_and_back_each_for_itself(schedule: str, chunks: int) -> None:
    """On one device nothing is chosen: more passes back, or forward, take what the ops of their stages take there."""
    own = make_pricer(mesh=make_mesh((1,)), cluster=parts(machine(2))[2], config=TrainConfig())
    way = way_before_planning(program(), own, machine(2), key(schedule, chunks, devices=2))
    stage_of, before = stages_of(way.begins, len(program().ops)), way_seconds(program(), own, way, True)
    prices = [own.op(op, ("invariant",)) for op in program().ops]
    draw = np.random.default_rng(0)
    for forward, backward in ((0.0, 1.0), (1.0, 0.0), (3.0, 2.0)):
        more = draw.integers(0, 5, (2, len(way.forward))) * np.array([[forward], [backward]])
        longer = replace(way, forward=way.forward + more[0], backward=way.backward + more[1])
        least = sum(
            more[0, stage] * price.forward + more[1, stage] * price.backward
            for stage, price in zip(stage_of, prices, strict=True)
        )
        found = way_seconds(program(), own, longer, True) - before
        assert found == pytest.approx(least, rel=1e-6) and least > 0


def test_rows_of_ranks_are_parts_of_the_whole() -> None:
    """One micro-batch in flight: at the update all ranks hold together what the whole model does; each that is in
    flight beside holds what the first keeps, at every moment."""
    first = fullest_share(program(), 2, "1f1b", 2, 1, even_starts(program(), 2, 1), (1,))
    assert first.ranks == (0, 1) and first.sent == (0.0, 0.0) and min(first.received) > 0
    own, other = first.ops
    assert own[0] and (own != other).all() and 0 < own.sum() < len(own)
    assert first.beside[0][own].max() == 1 and first.last[0] == slice(53, 101)
    assert first.beside[1].max() == 0 and first.last[1].stop == len(own)
    first = replace(first, received=(0.0, 0.0))
    everything, every = slice(0, len(program().ops)), np.ones_like(own)

    def share(ops: np.ndarray, beside: float = 0.0) -> Share:
        return Share(
            ranks=(0,),
            ops=ops[None],
            at_hand=ops[None] * 1.0,
            beside=ops[None] * beside,
            begun=every[None],
            last=(everything,),
            kinds=("FB",),
            sent=(0.0,),
            received=(0.0,),
        )

    def used(share: Share | None, choice: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
        made = build(program(), pricer(), limit=1e12, counted=Counting(share=share)).graph
        found = solve(replace(made, memory=None), relative_gap=1e-3)
        return usage(made, found.choice if choice is None else choice, found.arcs), found.choice

    whole, choice = used(None)
    same, _ = used(share(every), choice)
    assert same.max() == pytest.approx(whole.max())
    ranks = [used(share(ops), choice)[0].max() for ops in (own, other)]
    assert max(ranks) < whole.max() <= sum(ranks) * (1 + 1e-9)
    none, one, more = (used(share(own, beside), choice)[0].max() for beside in (0.0, 1.0, 2.0))
    assert none < one < more
    assert more - one == pytest.approx(one - none)
    assert used(first, choice)[0].max() == pytest.approx(one)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved-1f1b"])
def test_no_pass_holds_more_than_those_of_the_share(schedule: str) -> None:
    """Whatever a block's kept tensors and its gradients weigh, of blocks that are alike."""
    draw = random.Random(0)
    for p, chunks, m in [(2, 1, 2), (2, 1, 4), (2, 2, 2), (2, 2, 4), (4, 1, 8), (4, 1, 4), (2, 2, 8), (3, 1, 9)]:
        if (chunks > 1) == (schedule == "interleaved-1f1b"):
            order = make_order(schedule, p, m, chunks)
            begins = even_starts(program(), p, chunks)
            share = fullest_share(program(m), 2, schedule, p, chunks, begins, (0, p - 1))
            stage, sizes = stages_of(begins, len(program().ops)), dealt(len(starts_of(program())) + 1, p, chunks)
            firsts = [int((stage == number).argmax()) for number in range(p * chunks)]
            every_rank = [{int(number) % p for number in stage[ops]} for ops in share.ops]
            assert all(len(ranks) == 1 for ranks in every_rank)
            assert {0, p - 1} <= set().union(*every_rank)
            for rank in set().union(*every_rank):
                own = [number for number, ranks in enumerate(every_rank) if ranks == {rank}]
                _no_pass_holds_more(share, own, firsts, sizes, order.ranks[rank], draw)


def test_what_ranks_keep_at_most_is_counted_action_by_action() -> None:
    draw = random.Random(0)
    for _ in range(40):
        p, chunks, rounds_of = draw.randint(1, 5), draw.randint(1, 3), draw.randint(1, 4)
        schedule = "interleaved-1f1b" if chunks > 1 else draw.choice(["1f1b", "gpipe"])
        order = make_order(schedule, p, p * rounds_of, chunks)
        sizes = [draw.randint(0, 5) for _ in range(p * chunks)]
        for rank, most in enumerate(most_kept(order, sizes)):
            kept, seen = 0, [0]
            for action in order.ranks[rank]:
                kept += sizes[action.stage] * (action.kind == "F")
                seen.append(kept)
                kept -= sizes[action.stage] * (action.kind == "B")
            assert most == max(seen) and kept == 0


def _no_pass_holds_more(
    share: Share,
    passes: list[int],
    firsts: list[int],
    sizes: Sequence[int],
    actions: Sequence[Action],
    draw: random.Random,
) -> None:
    """Of a rank with these actions; firsts: positions of the first op of each stage."""
    held = share.beside[passes] + share.at_hand[passes]
    taken = [
        (float(kept[firsts] @ sizes), float(share.begun[number, firsts] @ sizes), share.kinds[number])
        for kept, number in zip(held, passes, strict=True)
    ]
    for kind in "FB":
        kept, begun, every = [0] * len(sizes), [0] * len(sizes), []
        for action in actions:
            kept[action.stage] += action.kind == "F"
            if action.kind == kind:
                every.append((float(np.dot(kept, sizes)), float(np.dot(begun, sizes))))
            kept[action.stage] -= action.kind == "B"
            begun[action.stage] |= action.kind == "B"
        assert {(k, g) for k, g, kinds in taken if kind in kinds} <= set(every)
        for _ in range(20):
            a, b = draw.random(), draw.random() ** 2 * share.beside.max()
            most = max(a * k + b * g for k, g in every)
            assert max(a * k + b * g for k, g, kinds in taken if kind in kinds) == pytest.approx(most)


@pytest.mark.parametrize("first", range(0, 200, 50))
def test_the_relaxation_is_below_every_choice(first: int) -> None:
    for seed in range(first, first + 50):
        drawn = replace(random_graph(seed), memory=None)
        try:
            best = brute_force.solve(drawn).seconds
        except InfeasibleError:
            with pytest.raises(InfeasibleError):
                solve(drawn)
            continue
        least = least_seconds(drawn)
        assert least <= best * (1 + 1e-6) + 1e-9
        for cutoff in (0.0, 0.3 * least, 0.9 * least, 1.1 * least):  # it ends earlier, and bounds as well
            assert min(cutoff, least) * (1 - 1e-9) <= least_seconds(drawn, cutoff) <= best * (1 + 1e-6) + 1e-9


def test_within_the_memory_of_the_first_rank_a_way_takes_more_and_the_plan_no_less() -> None:
    """Memory aside <= relaxed <= exact <= the plan that fits; and no cutoff above a bound is said to be reached."""
    cluster = machine(4)
    free = best_staged(program(), pricer(), cluster, key("1f1b", 1), _whole)
    assert free.plan is not None
    limit = 0.8 * free.plan.estimate.peak_nbytes
    found = best_staged(program(), pricer().within(limit), cluster, key("1f1b", 1), _whole)
    assert found.plan is not None and found.plan.estimate.peak_nbytes <= limit
    assert found.plan.estimate.step_seconds > free.plan.estimate.step_seconds
    way = found.way
    aside = way_seconds(program(), pricer(), way, True)
    relaxed, exact = (way_seconds(program(), pricer(), way, True, limit=limit, exact=e) for e in (False, True))
    assert aside < relaxed * (1 - 1e-3)
    assert relaxed <= exact * (1 + GAP) and exact <= found.plan.estimate.step_seconds
    assert (
        way_seconds(program(), pricer(), way, True, limit=limit, asked=SearchAim(cutoff=0.9 * relaxed)) >= 0.9 * relaxed
    )
    assert way_seconds(program(), pricer(), way, True, limit=limit, asked=SearchAim(cutoff=1.2 * exact)) < 1.2 * exact


@pytest.mark.parametrize(
    ("schedule", "chunks", "microbatches"), [("1f1b", 1, 8), ("gpipe", 1, 2), ("interleaved-1f1b", 2, 2)]
)
def test_no_rank_holds_less_than_is_counted_of_the_whole(schedule: str, chunks: int, microbatches: int) -> None:
    """So that a bound within the memory of the whole plan is one for the stages, with room and without, as far as sums
    over ops are what calls hold. Few micro-batches fill no pipeline: where most are in flight are no gradients yet."""
    cuts = even_cuts(program(microbatches), 2, chunks)
    counted: list[float] = []
    shares: list[float] = []

    def whole(own: Pricer, share: Share, mixes: bool) -> Exact:
        found = _whole(own, share, mixes, microbatches)
        cut, stages = staged(found.plan, program(microbatches), own, 2, schedule, cuts)
        prices = simulated(cut, stages, machine(4), own.cluster)[0].estimate.search.stages
        counted.append(found.counted_nbytes)
        if len(share.ranks) == 1:  # what proves
            shares.append(counted[-1] / prices[share.ranks[0]].nbytes)
        return found

    free = best_staged(program(microbatches), pricer(), machine(4), key(schedule, chunks, microbatches), whole)
    assert free.plan is not None
    tight = pricer().within(0.85 * free.plan.estimate.peak_nbytes)
    best_staged(program(microbatches), tight, machine(4), key(schedule, chunks, microbatches), whole)
    assert len(set(counted)) > 1
    assert min(shares) >= 0.6 and max(shares) <= 1 + COUNTED, shares


@pytest.mark.parametrize("error", [CutoffError(1e9), InfeasibleError("too small")])
def test_what_does_not_fit_in_less_room_than_there_is_proves_nothing(error: Exception) -> None:
    """Only the first search of a whole plan has all the room: a cutoff or a limit reached later is no bound."""
    rooms: list[float] = []

    def whole(own: Pricer, share: Share, _: bool) -> Exact:
        rooms.append(memory_limit(own.cluster, own.config))
        if len(rooms) == 1:
            return _whole(own.within(1e12), share)  # more than fits, so that it is searched again
        raise error

    tight = pricer().within(1e4)
    found = best_staged(program(), tight, machine(4), key("1f1b", 1), whole)
    assert found.plan is None and 0.0 < found.bound < 1.0
    assert rooms[0] == 1e4 > rooms[1]
    with pytest.raises(type(error)):  # rooms are not empty, so that the first search raises it
        best_staged(program(), tight, machine(4), key("1f1b", 1), whole)
