"""The search over meshes and micro-batches: complete, pruned without loss, and honest when it is stopped."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache

import pytest

from autopar.api import planning as api
from autopar.capture.rebatch import Batches
from autopar.errors import InfeasibleError, MeshError, SearchTimeoutError
from autopar.lower.program import make_program
from autopar.report.search_text import space_text
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.costs.states import states_nbytes
from autopar.search.exact.ilp import CutoffError
from autopar.search.joint import mesh_search
from autopar.search.joint.best_first import INTERRUPTED, PROVED, TIMED_OUT, Known, SearchOutcome, best_first
from autopar.search.joint.candidates import Candidate, CandidateSpace, candidates
from autopar.search.joint.mesh_search import search_meshes
from autopar.search.joint.quick_plans import quick_plans
from autopar.search.meshes import arrangements, meshes, parts
from autopar.search.planner import make_plan
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.divisors import divisors
from autopar.values.graph import CapturedModel
from autopar.values.plan import Plan, one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import machine, squares, squares_graph
from tests.zoo_graphs import zoo_graph

GAP = 1e-2


def test_meshes_follow_the_levels() -> None:
    shapes = {mesh.shape for mesh in meshes(load_cluster("4x8xh100"))}
    assert shapes == {(4, 8), (2, 2, 8), (4, 2, 4), (4, 4, 2)}
    assert {mesh.shape for mesh in meshes(load_cluster("8xh100"))} == {(8,), (2, 4), (4, 2), (2, 2, 2)}


def test_stages_take_equal_parts_from_the_slowest_level_on() -> None:
    found = parts(load_cluster("4x8xh100"))
    sizes = {n: tuple(level.size for level in part.levels) for n, part in found.items()}
    assert sizes == {1: (4, 8), 2: (2, 8), 4: (8,), 8: (4,), 16: (2,), 32: (1,)}
    assert all(n * part.num_devices == 32 for n, part in found.items())
    assert all(a.mesh.size * a.pipeline == 32 for a in arrangements(load_cluster("4x8xh100"), tuple(found)))


class Drawn:
    """Random problems: bounds below costs, some without an answer, some cut off."""

    def __init__(self, seed: int, trap: Callable[[int], None] = lambda _: None) -> None:
        draw = random.Random(seed)
        self.costs = [draw.uniform(1, 3) if draw.random() < 0.8 else math.inf for _ in range(30)]
        self.first = [min(c, 3) * draw.uniform(0.2, 1) for c in self.costs]
        self.second = [low + (min(c, 3) - low) * draw.random() for c, low in zip(self.costs, self.first, strict=True)]
        self.sharp: set[int] = set()
        self.fine: set[int] = set()
        self.begun: set[int] = set()
        self.solved: list[int] = []
        self.handed: int | None = None
        self.trap = trap

    def bound(self, key: int) -> float:
        return self.second[key] if key in self.sharp else self.first[key]

    def expected(self, key: int) -> float:
        return self.bound(key)

    def effort(self, key: int) -> float:
        return key % 2

    def scouts(self, keys: Sequence[int]) -> Sequence[int]:
        return keys[::7]

    def tighten(self, key: int, cutoff: float, seconds: float | None) -> tuple[str, float, float] | None:
        """Half way to the cost, if there is one."""
        if not math.isinf(self.costs[key]):
            self.second[key] = (self.second[key] + self.costs[key]) / 2
            self.sharp.add(key)
        return None

    def foresee_tightening(self, keys: Sequence[int], cutoff: float) -> None:
        assert all(self.bound(key) < math.inf for key in keys)

    def foresee(self, keys: Iterable[tuple[int, Known]], cutoff: float, seconds: float | None, solve: bool) -> None:
        assert self.handed is not None or any(self.costs[key] < math.inf for key in self.solved) == solve
        for key, known in keys:
            assert (known > Known.LITTLE) == (key in self.sharp) and key not in self.solved
            assert (known == Known.REFINED) == (key in self.fine)
            assert self.bound(key) < cutoff or (not self.solved and key in self.scouts(range(30)))

    def quick_plans(self, keys: Sequence[int], seconds: float | None) -> Iterator[tuple[int, str, float]]:
        """Some answers, not the best."""
        assert not self.solved and self.handed is None
        possible = sorted((key for key in keys if self.costs[key] < math.inf), key=self.costs.__getitem__)
        for self.handed in possible[:9:-1]:
            yield self.handed, "at hand", self.costs[self.handed]

    def sharpen(self, key: int, cutoff: float) -> bool:
        """Now and then it takes two goes."""
        done = key % 3 > 0 or key in self.begun
        self.begun.add(key)
        if done:
            self.sharp.add(key)
        return done

    def refine(self, key: int, cutoff: float) -> None:
        assert key in self.sharp - self.fine
        self.fine.add(key)

    def solve(self, key: int, cutoff: float, seconds: float | None) -> tuple[str, float, float]:
        assert key in self.fine
        self.trap(key)
        self.solved.append(key)
        if math.isinf(self.costs[key]):
            raise InfeasibleError("does not fit")
        if self.costs[key] >= cutoff:
            raise CutoffError(self.costs[key])
        return f"answer {key}", self.costs[key], self.second[key]


@pytest.mark.parametrize("seed", range(20))
def test_best_first_is_exhaustive_search_with_less_work(seed: int) -> None:
    problems = Drawn(seed)
    outcome = best_first(problems, range(30), relative_gap=0.01)
    least = min(problems.costs)
    assert outcome.cost <= least / 0.99 and outcome.answer == f"answer {outcome.key}"
    assert outcome.bound <= least
    assert outcome.bound >= outcome.cost * 0.99 or outcome.bound >= min(
        problems.second[k] for k, c in outcome.solved.items() if c is not None
    )
    assert len(problems.solved) < 30
    assert set(outcome.solved) | set(outcome.excluded) == set(range(30))


@pytest.mark.parametrize("seed", range(10))
def test_stopped_early_the_gap_is_still_true(seed: int) -> None:
    answered = []

    def stop(key: int) -> None:
        if answered:
            raise KeyboardInterrupt
        if not math.isinf(problems.costs[key]):
            answered.append(key)

    problems = Drawn(seed, stop)
    outcome = best_first(problems, range(30), relative_gap=0.0)
    assert outcome.bound <= min(problems.costs) <= outcome.cost
    assert outcome.status == INTERRUPTED or outcome.cost == min(problems.costs)
    with pytest.raises(SearchTimeoutError, match="give more time"):
        best_first(Empty(seed), range(30), relative_gap=0.0, seconds=1e-9)


class Empty(Drawn):
    """Nothing is at hand."""

    def quick_plans(self, keys: Sequence[int], seconds: float | None) -> Iterator[tuple[int, str, float]]:
        self.asked = [*keys]
        return iter(())


@pytest.mark.parametrize("seed", range(10))
def test_what_is_at_hand_is_an_answer_until_there_is_a_better_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = Drawn(seed)
    outcome = best_first(problems, range(30), relative_gap=0.0, seconds=1e-9)
    assert outcome.status == TIMED_OUT and outcome.answer == "at hand" and outcome.key == problems.handed
    assert outcome.bound <= min(problems.costs) <= outcome.cost and not outcome.solved
    monkeypatch.setattr("autopar.search.joint.best_first.PATIENCE", 0.0)
    patient = Drawn(seed)
    outcome = best_first(patient, range(30), relative_gap=0.0)
    assert outcome.cost == min(patient.costs) and patient.handed is not None and outcome.status == PROVED
    none = Empty(seed)
    assert best_first(none, range(30), relative_gap=0.0).cost == min(none.costs)
    assert none.asked == [*range(30)]


def test_an_interrupt_before_any_answer_is_an_interrupt() -> None:
    def stop(key: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        best_first(Drawn(0, stop), range(30), relative_gap=0.0)
    assert TIMED_OUT != INTERRUPTED


def test_an_interrupt_while_bounds_are_tightened_keeps_the_answer() -> None:
    class Stopped(Drawn):
        def tighten(self, key: int, cutoff: float, seconds: float | None) -> None:
            raise KeyboardInterrupt

    statuses = set()
    for seed in range(10):
        problems = Stopped(seed)
        outcome = best_first(problems, range(30), relative_gap=0.0)
        assert outcome.cost == min(problems.costs) >= outcome.bound
        statuses.add(outcome.status)
    assert INTERRUPTED in statuses


def test_a_bound_that_cannot_be_bettered_does_not_keep_the_others_low() -> None:
    class Stuck(Drawn):
        def tighten(self, key: int, cutoff: float, seconds: float | None) -> None:
            if key % 3 and not math.isinf(self.costs[key]):
                self.second[key] = self.costs[key]
                self.sharp.add(key)

    seen = 0
    for seed in range(20):
        problems = Stuck(seed)
        outcome = best_first(problems, range(30), relative_gap=0.0)
        known = {**outcome.excluded, **outcome.bounds}
        stuck = [bound for key, bound in known.items() if key % 3 == 0 and bound < outcome.cost]
        assert outcome.bound == min([outcome.cost, *stuck]) <= min(problems.costs)
        seen += len(stuck)
    assert seen


def test_an_answer_met_while_bounds_are_tightened_is_taken() -> None:
    """Of problems that were given up for their time; what is proved then holds for it."""

    class Slow(Drawn):
        def solve(self, key: int, cutoff: float, seconds: float | None) -> tuple[str, float, float]:
            if key % 2:
                raise SearchTimeoutError("no time")
            return super().solve(key, cutoff, seconds)

        def tighten(self, key: int, cutoff: float, seconds: float | None) -> tuple[str, float, float] | None:
            self.second[key] = self.costs[key]
            self.sharp.add(key)
            return None if math.isinf(self.costs[key]) else (f"answer {key}", self.costs[key], self.costs[key])

    taken = 0
    for seed in range(20):
        problems = Slow(seed)
        outcome = best_first(problems, range(30), relative_gap=0.0)
        assert outcome.key is not None and outcome.cost == problems.costs[outcome.key] == min(problems.costs)
        assert outcome.answer == f"answer {outcome.key}" and outcome.bound == outcome.cost
        taken += outcome.key % 2
    assert 0 < taken < 20


def test_problems_given_up_beside_such_as_have_no_answer_are_told_apart() -> None:
    """Time was not what they lacked; where all are given up it may have been."""

    class GivenUp(Drawn):
        none = True

        def solve(self, key: int, cutoff: float, seconds: float | None) -> tuple[str, float, float]:
            if self.none and key % 2:
                raise InfeasibleError("does not fit")
            raise SearchTimeoutError("not found")

        def tighten(self, key: int, cutoff: float, seconds: float | None) -> None:
            return None

        def quick_plans(self, keys: Sequence[int], seconds: float | None) -> Iterator[tuple[int, str, float]]:
            assert set(keys) <= set(range(0, 30, 2)) or not self.none
            return iter(())

    outcome = best_first(GivenUp(0), range(30), relative_gap=0.01)
    assert outcome.answer is None and math.isinf(outcome.cost)
    assert set(outcome.failures) == set(range(1, 30, 2)) and set(outcome.excluded) == set(range(0, 30, 2))
    problems = GivenUp(0)
    problems.none = False
    with pytest.raises(SearchTimeoutError, match="no plan was found in the time given"):
        best_first(problems, range(30), relative_gap=0.01)


def graph_of(batch: int) -> CapturedModel:
    return zoo_graph("vit", batch, batch=4)


def part_of(count: int) -> CapturedModel:
    """The captured graph of one of so many micro-batches."""
    return Batches(capture=graph_of, batch=4).captured_microbatch(count)


@cache
def without_a_limit(cluster: Cluster) -> Plan:
    options = SearchOptions(relative_gap=GAP, with_baselines=False)
    return search_meshes(4, graph_of, cluster, TrainConfig(), options)[0]


@pytest.mark.parametrize(("share", "buckets"), [(1.0, False), (0.8, True)])
def test_the_joint_search_finds_what_trying_everything_finds(share: float, buckets: bool) -> None:
    """Every mesh of 4 devices with every number of micro-batches, each planned by itself, with and without a limit.

    Under one what a host's optimizer takes for each parameter of which it has a part, be it ever so small, leaves a gap
    of some percent.
    """
    cluster = machine(4)
    cluster = replace(cluster, device=replace(cluster.device, name="another"))
    config = TrainConfig()
    found = without_a_limit(cluster)
    gap = 3 * GAP if buckets else GAP
    options = SearchOptions(relative_gap=gap, with_baselines=False, buckets=buckets)
    if share < 1.0:
        config = TrainConfig(memory_nbytes=found.estimate.peak_nbytes * share)
        found, _ = search_meshes(4, graph_of, cluster, config, options)
    alone = {}
    for count in divisors(4):
        for mesh in meshes(cluster):
            try:
                plan = make_plan(part_of(count), cluster, mesh, config, options)
            except InfeasibleError:
                continue
            alone[mesh, count] = plan.estimate.in_turn_seconds
    assert found.estimate.step_seconds <= min(alone.values()) * (1 + 2 * gap)
    assert found.estimate.bound <= min(alone.values()) * (1 + 1e-6)
    assert found.estimate.gap <= (0.1 if buckets else GAP), "starts that no bucket shares under this limit are left"
    space = found.estimate.search.space
    assert space is not None and space.candidates == 6 and space.planned < 6
    assert space.status == "proved" or buckets


def test_of_what_was_met_the_fastest_as_it_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds are of everything in turn, and so is the order of the search; the plan need not be the best of that."""
    cluster, finished = machine(8), []
    options = SearchOptions(with_baselines=False)
    plan = one_stage(make_plan(graph_of(4), cluster, meshes(cluster)[0], TrainConfig(), options))
    keys = candidates(cluster, (1,), (1,), "auto", 1)[:3]
    hidden = (0.0, 0.5, 0.2)  # of as many seconds, and 0.1 and 0.2 of them more
    seconds = [{"forward": (1 + 0.1 * i) * plan.estimate.step_seconds} for i in range(3)]
    made = [replace(plan, estimate=replace(plan.estimate, seconds=s, hidden=h * s["forward"], baselines={}))
            for s, h in zip(seconds, hidden, strict=True)]  # fmt: skip

    def searched(*_: object, **__: object) -> SearchOutcome[Candidate, Plan]:
        outcome = SearchOutcome[Candidate, Plan]()
        for key, one in zip(keys, made, strict=True):
            outcome.take(key, one, one.estimate.in_turn_seconds)
        return outcome

    def finish(found: Plan, *_: object) -> Plan:
        finished.append(found.estimate.step_seconds)
        return found

    monkeypatch.setattr(mesh_search, "best_first", searched)
    space, options = CandidateSpace(microbatches=1), SearchOptions(relative_gap=GAP)
    found, _ = search_meshes(4, graph_of, cluster, TrainConfig(), options, space, finish=finish)
    assert finished == [made[0].estimate.step_seconds, made[1].estimate.step_seconds], "both may become faster yet"
    assert found.estimate.step_seconds == made[1].estimate.step_seconds
    said = found.estimate.search.space
    assert said is not None and said.in_turn is not None and said.in_turn.plan == str(keys[0])
    assert f"{keys[0]} takes the least if nothing runs beside" in space_text(said)


def test_a_plan_is_at_hand_where_few_fit() -> None:
    cluster, counts = machine(4), (2, 4)
    programs = {count: make_program(part_of(count)) for count in counts}
    keys = candidates(cluster, counts, (1,), "auto", 3)

    def found(nbytes: float, seconds: float | None = None) -> list[tuple[Candidate, StagePlan]]:
        config = TrainConfig(memory_nbytes=nbytes)

        def pricer(key: Candidate) -> Pricer:
            return make_pricer(mesh=key.arrangement.mesh, cluster=cluster, config=config)

        return [*quick_plans(keys, programs.__getitem__, pricer, seconds, SearchOptions())]

    most = 0.8 * without_a_limit(machine(4)).estimate.peak_nbytes
    taken = found(most)
    assert taken and not found(1000.0) and not found(most, 0.0)
    assert taken[0][0].microbatches == 4
    seconds = [plan.estimate.step_seconds for _, plan in taken]
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[-1] >= without_a_limit(machine(4)).estimate.step_seconds * (1 - GAP)
    for key, plan in taken:
        assert plan.mesh == key.arrangement.mesh and plan.microbatches == key.microbatches
        assert plan.estimate.peak_nbytes <= most and plan.estimate.search.is_rough


def test_in_the_api_every_mesh_is_searched() -> None:
    model, inputs = squares()
    made = api.plan(model, inputs, cluster=machine(2), mesh="auto", relative_gap=0.02, with_baselines=False)
    assert made.captured is not None and made.mesh.size == 2
    made.check(made.captured)
    assert "meshes" in str(made)
    fixed = api.plan(model, inputs, cluster=machine(2), mesh="auto", microbatches=2, with_baselines=False)
    assert fixed.microbatches == 2
    with pytest.raises(MeshError, match="baseline"):
        api.plan(model, inputs, cluster=machine(4), mesh="auto", baseline="ddp")


def test_where_nothing_fits_the_least_that_would_do_is_said() -> None:
    config = TrainConfig(memory_nbytes=1.01 * states_nbytes(make_program(squares_graph(4)), "adamw") / 2)
    with pytest.raises(InfeasibleError, match="nothing fits on any mesh") as caught:
        search_meshes(4, squares_graph, machine(2), config, SearchOptions(relative_gap=GAP))
    least = caught.value.least_nbytes
    assert least is not None and config.memory_nbytes is not None and least > config.memory_nbytes
    config = TrainConfig(memory_nbytes=1.001 * least)
    found, _ = search_meshes(4, squares_graph, machine(2), config, SearchOptions(relative_gap=GAP))
    assert found.estimate.peak_nbytes <= 1.001 * least
