"""Pipeline schedules: simulated = closed form, ours = torch's order, and the published bubble rates."""

import random
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from autopar.cost_models.pipeline import (
    Beside,
    Pipeline,
    Segment,
    StageWork,
    make_pipeline,
    uniform_work,
)
from autopar.cost_models.schedules import SCHEDULES, Action, PipelineOrder, make_order, parse_order
from autopar.cost_models.step_time import pipeline_seconds
from autopar.cost_models.timeline import busy_seconds, critical_path_seconds, simulate
from autopar.cost_models.trace import chrome_trace
from autopar.errors import ArgumentError
from benchmarks import bubble_rates

REFERENCES = bubble_rates.REFERENCES


def uniform(name: str, p: int, m: int, v: int, seconds: dict[str, float], send: float = 0.0) -> Pipeline:
    order = make_order(name, p, m, v)
    return make_pipeline(order, uniform_work(order, seconds, send))


def makespan(name: str, p: int, m: int, v: int, seconds: dict[str, float], send: float = 0.0) -> float:
    return simulate(uniform(name, p, m, v, seconds, send).tasks).makespan


def cases(count: int) -> list[tuple[int, int, int, float, float, float]]:
    """p, m, v and seconds of F, I and W with W the shortest, whole numbers so that sums are exact."""
    rng = random.Random(0)
    out = []
    for _ in range(count):
        p, v = rng.randint(1, 9), rng.randint(1, 4)
        m = p * rng.randint(1, 5)
        f, i = rng.randint(1, 9), rng.randint(1, 9)
        out.append((p, m, v, float(f), float(i), float(rng.randint(1, min(f, i)))))
    return out


@pytest.mark.parametrize(("p", "m", "v", "f", "i", "w"), cases(25))
def test_makespans_are_the_closed_forms(p: int, m: int, v: int, f: float, i: float, w: float) -> None:
    whole = {"F": f, "B": i + w}
    split = {"F": f, "I": i, "W": w}
    odd = m + 1  # these two need no multiple of p
    assert makespan("gpipe", p, odd, 1, whole) == (odd + p - 1) * (f + i + w)
    assert makespan("1f1b", p, odd, 1, whole) == (odd + p - 1) * (f + i + w)
    chunk = {"F": f, "B": i + w}  # of one of v stages
    assert makespan("interleaved-1f1b", p, m, v, chunk) == (m * v + p - 1) * (f + i + w)
    assert makespan("zb-h1", p, odd, 1, split) == odd * (f + i + w) + (p - 1) * (f + i - w)


@pytest.mark.parametrize(("p", "m", "v", "f", "i", "w"), cases(10))
def test_the_step_model_has_the_same_closed_forms(p: int, m: int, v: int, f: float, i: float, w: float) -> None:
    """`step_time.pipeline_seconds`: equal stages under every schedule, uneven ones under GPipe; 1F1B never below."""

    def formula(forward: list[float], backward: list[float], schedule: str, stages: int = 1) -> float:
        one = np.ones(p)
        return pipeline_seconds(np.array(forward), np.array(backward), w * one, one, m, schedule, stages)

    def simulated(name: str, forward: list[float], backward: list[float]) -> float:
        order = make_order(name, p, m)
        work = [
            StageWork(actions={"F": (Segment(0, a),), "B": (Segment(0, b),)})
            for a, b in zip(forward, backward, strict=True)
        ]
        return simulate(make_pipeline(order, work).tasks).makespan

    equal = [f] * p, [i + w] * p
    assert formula(*equal, "1f1b") == simulated("1f1b", *equal)
    assert formula(*equal, "gpipe") == simulated("gpipe", *equal)
    assert formula(*equal, "1f1b", v) == pytest.approx(
        makespan("interleaved-1f1b", p, m, v, {"F": f / v, "B": (i + w) / v})
    )
    assert formula(*equal, "zb-1p") == makespan("zb-h1", p, m, 1, {"F": f, "I": i, "W": w})
    if m >= 2 * p - 1:
        assert formula([w] * p, [2 * w] * p, "zbv") == pytest.approx(3 * m * w + (p - 1) * w / 2)
    rng = random.Random(p * m)
    uneven = [rng.uniform(1, 2) for _ in range(p)], [rng.uniform(1, 3) for _ in range(p)]
    assert formula(*uneven, "gpipe") == pytest.approx(simulated("gpipe", *uneven), rel=1e-12)
    assert formula(*uneven, "1f1b") >= simulated("1f1b", *uneven) - 1e-9


@pytest.mark.parametrize(("p", "m"), [(p, 2 * p - 1 + extra) for p in range(1, 8) for extra in (0, 1, 5)])
def test_zero_bubble_schedules_have_none_when_their_parts_take_equal_time(p: int, m: int) -> None:
    for name, v in [("zb-h2", 1), ("zbv", 2)]:
        pipeline = uniform(name, p, m, v, {"F": 1.0, "I": 1.0, "W": 1.0})
        timeline = simulate(pipeline.tasks)
        assert pipeline.longest_span(timeline) == 3 * m * v
        assert timeline.makespan == 3 * m * v + p - 1, "the last rank starts p - 1 forwards late"


@pytest.mark.parametrize(("f", "i", "w"), [(3.0, 4.0, 2.0), (5.0, 4.0, 3.0), (2.0, 2.0, 1.0)])
def test_zb_h2_keeps_the_bubble_that_its_parts_leave(f: float, i: float, w: float) -> None:
    for p, m in [(2, 8), (4, 12), (6, 20)]:
        pipeline = uniform("zb-h2", p, m, 1, {"F": f, "I": i, "W": w})
        assert pipeline.longest_span(simulate(pipeline.tasks)) == m * (f + i + w) + (p - 1) * (f + i - 2 * w)


def torch_order(kind: str, p: int, m: int, v: int) -> list[str]:
    """What torch.distributed.pipelining would run, without its processes."""
    schedule = SimpleNamespace(
        pp_group_size=p, n_local_stages=v, num_stages=p * v, _n_microbatches=m, number_of_rounds=m // p
    )
    schedule.microbatches_per_round = m // schedule.number_of_rounds
    rows = [getattr(torch_schedules, kind)._calculate_single_rank_operations(schedule, rank) for rank in range(p)]
    return [",".join("" if action is None else str(action) for action in row) for row in rows]


@pytest.mark.parametrize("p", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("rounds", [2, 3])
@pytest.mark.parametrize("v", [1, 2, 3])
def test_orders_are_those_that_torch_runs(p: int, rounds: int, v: int) -> None:
    m = p * rounds
    theirs = {
        "interleaved-1f1b": torch_order("ScheduleInterleaved1F1B", p, m, v),
        "interleaved-zero-bubble": torch_order("ScheduleInterleavedZeroBubble", p, m, v),
    }
    if v == 2:
        theirs["zbv"] = torch_order("ScheduleZBVZeroBubble", p, m, v)
    for name, lines in theirs.items():
        assert parse_order(lines) == make_order(name, p, m, v), name


def recursive_makespan(order: PipelineOrder, work: list[StageWork]) -> float:
    """Ends of actions by their definition: after the rank's action before, the neighbour's and its message."""
    owner = {a.stage: rank for rank, actions in enumerate(order.ranks) for a in actions}
    previous = {b: a for actions in order.ranks for a, b in pairwise(actions)}
    kinds = {a for actions in order.ranks for a in actions}
    ends: dict[Action, float] = {}

    def end(action: Action) -> float:
        if action not in ends:
            stage, kind, k = action
            begin = end(previous[action]) if action in previous else 0.0
            back = "B" if Action(stage, "B", k) in kinds else "I"
            if kind == "F" and stage > 0:
                send = work[stage - 1].send_forward if owner[stage - 1] != owner[stage] else 0.0
                begin = max(begin, end(Action(stage - 1, "F", k)) + send)
            elif kind == back:
                begin = max(begin, end(Action(stage, "F", k)))
                if stage + 1 < order.num_stages:
                    send = work[stage + 1].send_backward if owner[stage + 1] != owner[stage] else 0.0
                    begin = max(begin, end(Action(stage + 1, back, k)) + send)
            elif kind == "W":
                begin = max(begin, end(Action(stage, "I", k)))
            ends[action] = begin + sum(segment.seconds for segment in work[stage].actions[kind])
        return ends[action]

    return max(end(action) for action in sorted(kinds, key=lambda a: (a.microbatch, a.stage)))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_uneven_stages_and_messages(name: str) -> None:
    """Against the definition. Messages are shorter than actions, so none waits on its link for another."""
    rng = random.Random(name)
    v = SCHEDULES[name].stages_per_rank or 3
    for p, m in [(1, 3), (2, 4), (3, 6), (4, 8)]:
        order = make_order(name, p, m, v)
        work = [
            StageWork(
                actions={
                    kind: tuple(Segment(0, rng.uniform(1, 3)) for _ in range(rng.randint(1, 3))) for kind in "FBIW"
                },
                send_forward=rng.uniform(0, 0.9),
                send_backward=rng.uniform(0, 0.9),
            )
            for _ in range(order.num_stages)
        ]
        tasks = make_pipeline(order, work).tasks
        timeline = simulate(tasks)
        assert timeline.makespan == pytest.approx(recursive_makespan(order, work), rel=1e-12)
        assert timeline.makespan >= max(critical_path_seconds(tasks), busy_seconds(tasks).max()) - 1e-9


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_slower_links_are_never_faster(name: str) -> None:
    seconds = {"F": 1.0, "B": 2.0, "I": 1.1, "W": 0.8}
    v = SCHEDULES[name].stages_per_rank or 2
    times = [makespan(name, 4, 8, v, seconds, send) for send in (0.0, 0.01, 0.1, 0.5, 1.0, 3.0)]
    assert times == sorted(times)


def held(order: PipelineOrder, kept_for_weights: float) -> float:
    """The most micro-batches' activations that any rank holds, of one stage a rank."""
    most = 0.0
    for actions in order.ranks:
        now = 0.0
        for action in actions:
            now += {"F": 1.0, "B": -1.0, "I": kept_for_weights - 1, "W": -kept_for_weights}[action.kind]
            most = max(most, now)
    return most


def test_activations_held() -> None:
    for p in (2, 4, 7):
        m = 3 * p
        assert held(make_order("gpipe", p, m), 0.5) == m
        assert held(make_order("1f1b", p, m), 0.5) == p
        assert held(make_order("zb-h1", p, m), 0.5) <= p
        assert held(make_order("zb-h2", p, m), 0.5) <= 2 * p - 1


@pytest.mark.skipif(not REFERENCES.is_dir(), reason="needs the published measurements beside the repository")
def test_published_bubble_rates_within_a_point() -> None:
    rows = bubble_rates.rows(REFERENCES)
    assert len(rows) == 36
    for row in rows:
        assert row["simulated"] == pytest.approx(row["published"], abs=0.01), row["id"]


def test_collectives_hold_up_or_run_beside() -> None:
    """Two stages, one micro-batch: what waits for what, by hand."""
    order = make_order("gpipe", 2, 1)
    work = StageWork(
        actions={"F": (Segment(0, 1.0), Segment(1, 0.5)), "B": (Segment(0, 2.0), Segment(0, 2.0))},
        beside=(Beside(0, 2, 10.0), Beside(1, 1, 2.0, gather=True)),
        after=(Segment(0, 0.25),),
    )
    pipeline = make_pipeline(order, [work, work], ("compute", "inner", "outer"))
    timeline = simulate(pipeline.tasks)
    ends = dict(
        zip(zip(pipeline.describe(), pipeline.rank_of_task.tolist(), strict=True), timeline.finish, strict=True)
    )
    assert ends["0F0", 0] == 2.5, "the second half of forward waits for what is gathered"
    assert ends["1F0", 1] == 4.0
    assert ends["1B0", 1] == 8.0
    assert ends["0B0", 0] == 12.0
    assert ends["reduce", 1] == 16.0, "from the first half of backward on"
    assert ends["update", 1] == 16.25
    assert timeline.makespan == ends["update", 0] == 20.25
    trace = chrome_trace(pipeline.tasks, timeline, names=pipeline.describe(), streams=pipeline.streams())
    threads = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert threads == ["compute", "inner", "outer"] * 2, "a stream that nothing runs on is left out"


def test_a_thousand_ranks() -> None:
    """16 stages of tensor-parallel layers, 100 in all, 256 micro-batches: 64 ranks a stage are alike."""
    order = make_order("1f1b", 16, 256)
    layers = [7] * 4 + [6] * 12
    layer = {kind: (Segment(0, s), Segment(1, 1e-4)) * 2 for kind, s in (("F", 1e-3), ("B", 2e-3))}
    work = [StageWork(actions={k: chain * n for k, chain in layer.items()}, send_forward=1e-4) for n in layers]
    tasks = make_pipeline(order, work, ("compute", "nvlink")).tasks
    assert len(tasks) == 2 * 256 * 4 * 100 + 15 * 256
    timeline = simulate(tasks)
    slowest = 7 * 2 * (1e-3 + 2e-3 + 2e-4)
    assert (256 + 3) * slowest < timeline.makespan < (256 + 15) * slowest + 16 * 1e-4


def test_orders_that_cannot_be() -> None:
    with pytest.raises(ArgumentError, match="'pipedream'; choose one of gpipe"):
        make_order("pipedream", 2, 4)
    with pytest.raises(ArgumentError, match="in 2 equal rounds, which 9 are not; use"):
        make_order("interleaved-1f1b", 4, 9, 2)
    with pytest.raises(ArgumentError, match="zbv has 2 stages a rank, not 1"):
        make_order("zbv", 4, 8)
    with pytest.raises(ArgumentError, match="must each be at least 1"):
        make_order("1f1b", 0, 8)
    with pytest.raises(ArgumentError, match="rank 1: '1SEND_F0' is no action"):
        parse_order(["0F0,0B0", "1F0,1SEND_F0"])
    with pytest.raises(ArgumentError, match="appears twice"):
        parse_order(["0F0,0F0,0B0"])
    with pytest.raises(ArgumentError, match="stage 0 is on ranks 0 and 1"):
        parse_order(["0F0,1F0,1B0", "0B0"])
    with pytest.raises(ArgumentError, match="passes stage 0 by FW; it must pass by F and B"):
        parse_order(["0F0,0W0"])
    with pytest.raises(ArgumentError, match="micro-batch 0 passes stage 1 by no action"):
        parse_order(["0F0,0B0", "2F0,2B0"])
    with pytest.raises(ArgumentError, match="1F0 is outside 1 stages"):
        PipelineOrder(
            ranks=((Action(0, "F", 0), Action(0, "B", 0), Action(1, "F", 0)),), num_stages=1, num_microbatches=1
        )
    with pytest.raises(ArgumentError, match="wait for each other"):
        simulate(make_pipeline(backwards := parse_order(["0B0,0F0"]), uniform_work(backwards, {"F": 1, "B": 1})).tasks)


def test_one_action_more_less_or_elsewhere_makes_no_order() -> None:
    rng = random.Random(0)
    for _ in range(300):
        name, p, v = rng.choice([("1f1b", 3, 1), ("zb-h1", 2, 1), ("zbv", 2, 2), ("interleaved-1f1b", 2, 2)])
        order = make_order(name, p, 4, v)
        ranks = [list(actions) for actions in order.ranks]
        at, to = rng.choice(ranks), rng.choice(ranks)
        place = rng.randrange(len(at))
        change = rng.randrange(4)
        if change == 0:
            del at[place]
        elif change == 1:
            to.insert(0, at[place])
        elif change == 2:
            at[place] = at[place]._replace(kind=rng.choice([kind for kind in "FBIWX" if kind != at[place].kind]))
        else:
            field = rng.choice(["stage", "microbatch"])
            at[place] = at[place]._replace(**{field: rng.choice([-1, 1, 50]) + getattr(at[place], field)})
        with pytest.raises(ArgumentError, match="pipeline order"):
            PipelineOrder(ranks=tuple(map(tuple, ranks)), num_stages=order.num_stages, num_microbatches=4)
        again = PipelineOrder(ranks=order.ranks, num_stages=order.num_stages, num_microbatches=4)
        assert again == order and hash(again) == hash(order)
        rank, stage, kind, microbatch = (numbers.tolist() for numbers in again.table)
        named = [(s, "FBIW"[k], m) for s, k, m in zip(stage, kind, microbatch, strict=True)]
        assert named == [action for actions in order.ranks for action in actions]
        assert rank == [number for number, actions in enumerate(order.ranks) for _ in actions]


def test_work_that_does_not_fit() -> None:
    order = make_order("zb-h1", 2, 2)
    with pytest.raises(ArgumentError, match="stage 0: the order runs its I, but its work has none"):
        make_pipeline(order, uniform_work(order, {"F": 1.0, "B": 2.0}))
    with pytest.raises(ArgumentError, match="2 stages, but work is given for 1"):
        make_pipeline(order, uniform_work(order, {"F": 1.0, "I": 1.0, "W": 1.0})[:1])
    full = {kind: (Segment(0, 1.0),) for kind in "FIW"}
    with pytest.raises(ArgumentError, match="lane 1 does not exist"):
        make_pipeline(order, [StageWork(actions=full, beside=(Beside(0, 1, 1.0),))] * 2)
    with pytest.raises(ArgumentError, match="segment 1 does not exist"):
        make_pipeline(order, [StageWork(actions=full, beside=(Beside(1, 0, 1.0),))] * 2)
    with pytest.raises(ArgumentError, match="takes -1"):
        make_pipeline(order, uniform_work(order, {"F": -1.0, "I": 1.0, "W": 1.0}))
