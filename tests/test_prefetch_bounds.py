"""What workers answer is what this process does, whoever is asked, and without them the search goes on."""

import math
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from autopar.capture.rebatch import Batches
from autopar.errors import InfeasibleError
from autopar.search.exact.ilp import CutoffError
from autopar.search.joint import workers as workers_module
from autopar.search.joint.best_first import Known
from autopar.search.joint.candidates import Candidate, candidates
from autopar.search.joint.joint import Joint
from autopar.search.joint.prefetch import Prefetch
from autopar.search.joint.questions import Question, Relaxing, Setup, Solved, Solving
from autopar.search.joint.relaxing import relaxed_seconds
from autopar.search.joint.workers import LARGE, WORKER, Workers, spare_cores, spare_workers, started
from autopar.search.search_options import SearchOptions
from autopar.values.cluster import load_cluster
from autopar.values.train_config import TrainConfig
from tests.search_cases import program_of
from tests.test_house import imported_modules, product, unit
from tests.zoo_graphs import zoo_graph

CLUSTER = load_cluster("8xh100")
SETUP = Setup(counts=(1,), cluster=CLUSTER, config=TrainConfig(), options=SearchOptions(relative_gap=0.01))


@pytest.fixture(scope="module")
def one() -> Iterator[Workers]:
    """A worker of one search after another."""
    with Workers(WORKER, 1) as workers:
        yield workers


@contextmanager
def helped(workers: Workers, setup: Setup = SETUP) -> Iterator[tuple[Joint, Prefetch, Workers]]:
    """A search with workers, for which nothing waits afterwards."""
    joint = Joint(graph=lambda _: program_of("gpt2").captured, setup=setup, workers=workers)
    yield joint, joint._prefetch, workers
    joint._prefetch.foresee(())


def test_a_plan_that_was_found_since_lowers_the_cutoff_of_what_waits(one: Workers) -> None:
    with helped(one) as (joint, ahead, _):
        key, later, *_ = candidates(CLUSTER, (1,), (1,), "auto", 1)
        joint.foresee([(key, Known.REFINED), (later, Known.REFINED)], math.inf, None, True)
        asked = [question for question in ahead._asked if isinstance(question, Solving)]
        assert asked and all(question.cutoff == math.inf for question in asked)
        found = joint.answer(Solving(key=key, cutoff=math.inf, deadline=None)).found
        assert isinstance(found, tuple)
        fresh = joint._fresh(Solving(key=later, cutoff=math.inf, deadline=None))
        assert isinstance(fresh, Solving) and fresh.cutoff == found[1] * (1 - SETUP.options.relative_gap)
        lower = joint._fresh(replace(fresh, cutoff=0.0))
        assert isinstance(lower, Solving) and lower.cutoff == 0.0  # never a higher one


def alone(setup: Setup = SETUP) -> Joint:
    return Joint(graph=lambda _: program_of("gpt2").captured, setup=setup)


def keys() -> list[Candidate]:
    return [k for k in candidates(CLUSTER, (1,), (1,), "auto", 2) if k.arrangement.mesh.num_axes < 3]


def bounds() -> list[Relaxing]:
    return [Relaxing(arrangement=key.arrangement, microbatches=1, times=1) for key in keys()]


def test_who_finds_a_bound_does_not_matter_and_what_they_would_is_found_here_once_they_died() -> None:
    asked, here = bounds(), alone()
    with Workers(WORKER, 2) as two, helped(two) as (_, ahead, workers):
        ahead.foresee([*asked[1:], *asked[1:]])
        assert workers._threads._work_queue.qsize() <= len(asked) - 1  # each once
        there = {one: future.result() for one, future in ahead._asked.items()}
        assert set(there) == set(asked[1:])
        assert all(ahead.knows(one) for one in asked[1:]) and not ahead.knows(asked[0])
        found = [ahead.of(one) for one in asked]
        assert found[1:] == [there[one] for one in asked[1:]]
        for process in workers.processes:
            os.kill(process.pid, signal.SIGKILL)
        with helped(two) as (_, ahead, _workers):
            ahead.foresee(asked[:2])
            assert [ahead.of(one) for one in asked[:2]] == pytest.approx([here.answer(one) for one in asked[:2]])
    assert found == pytest.approx([here.answer(one) for one in asked], rel=1e-12)
    own = relaxed_seconds(program_of("gpt2"), here._pricers.of(asked[0].arrangement, 1), asked[0].times, True)
    assert found[0] == pytest.approx(own, rel=1e-12)


def test_a_worker_loads_nothing_that_traces() -> None:
    """Which takes torch longer to import than all else that a search needs."""
    known, loaded, left = set(product()), set[str](), {WORKER}
    while left:
        loaded |= left
        sources = [product()[name].read_text() for name in left & known]
        left = {name for source in sources for name in imported_modules(source, known)} - loaded
    assert "autopar.search.joint.joint" in loaded and not [name for name in loaded if unit(name) == "capture"]


def test_workers_make_graphs_of_a_line_themselves(one: Workers) -> None:
    """Of all numbers of micro-batches, from its ends, once one is known to be on it; each end is sent once."""
    batches = Batches(capture=lambda size: zoo_graph("llama", size), batch=8)
    counts = (1, 2, 4, 8)
    setup, arrangement = replace(SETUP, counts=counts), keys()[0].arrangement
    asked = [Relaxing(arrangement=arrangement, microbatches=count, times=count) for count in counts]
    joint = Joint(
        graph=batches.microbatch,
        line=batches.find_line,
        line_at_hand=lambda: batches.line,
        setup=setup,
        workers=one,
    )
    joint._prefetch.foresee(asked[2:3])  # 4 of 2 samples: between the ends
    assert batches.line is not None and not joint.programs.graphs
    joint._prefetch.foresee(asked)
    there = [joint._prefetch._asked[question].result() for question in asked]
    ends = joint._prefetch._ends
    assert not joint.programs.graphs and ends is not None and ends[2] == (1, 8)
    here = Joint(graph=batches.captured_microbatch, setup=setup)
    assert there == pytest.approx([here.answer(question) for question in asked], rel=1e-12)


def test_a_relaxation_ends_where_it_excludes_all_multiples() -> None:
    """It is a bound wherever it ends, and no worse than what excludes."""
    here = alone()
    for one in bounds():
        least = here.answer(one)
        for part in (0.5, 0.9, 0.99, 1.1):
            asked = replace(one, times=one.times + 1, cutoff=part * least)
            whole, ended = here.answer(replace(asked, cutoff=math.inf)), here.answer(asked)
            assert min(asked.enough(), whole) * (1 - 1e-9) <= ended <= whole * (1 + 1e-9)
            assert asked.enough() == pytest.approx(2 * part * least)


def test_who_finds_a_plan_does_not_matter(one: Workers) -> None:
    """The plan and its bound, that none is below a cutoff (which may be an older one), and that none fits."""
    first, second, *_ = keys()
    here = alone()
    answer, cost, bound = here.solve(first, math.inf, None)
    with helped(one) as (joint, ahead, _):
        joint.foresee([(first, Known.REFINED), (second, Known.REFINED)], math.inf, None, True)
        ahead._asked[Solving(key=first, cutoff=0.0, deadline=None)].result()
        plan, *others = joint.solve(first, 10 * cost, None)
        plan.check(program_of("gpt2").captured)
        assert others == pytest.approx([cost, bound]) and plan.single.choices == answer.single.choices
        assert isinstance(ahead._asked[Solving(key=second, cutoff=0.0, deadline=None)].result(), Solved)
    with helped(one) as (joint, ahead, _):
        joint.foresee([(first, Known.REFINED), (second, Known.REFINED)], cost / 2, None, True)
        with pytest.raises(CutoffError) as there:
            joint.solve(first, cost / 4, None)
        assert cost / 2 <= there.value.bound <= cost
    small = Setup(
        counts=(1,), cluster=CLUSTER, config=TrainConfig(memory_nbytes=1e3), options=SearchOptions(relative_gap=0.01)
    )
    with helped(one, small) as (joint, _, _workers):
        joint.foresee([(first, Known.REFINED)], math.inf, None, True)
        for cutoff in (math.inf, 1e3):
            for searching in (joint, alone(small)):
                with pytest.raises(InfeasibleError):
                    searching.solve(first, cutoff, None)


def test_a_problem_without_stages_is_tightened_by_solving_it_with_more_time() -> None:
    """Below what it takes the answer comes; else a bound, of what it takes at most; and that nothing fits."""
    first, *_ = keys()
    _, cost, _ = alone().solve(first, math.inf, None)
    joint = alone()
    assert joint.tighten(first, cost / 2, None) is None
    assert cost / 2 <= joint.bound(first) <= cost
    found = joint.tighten(keys()[1], math.inf, None)
    assert found is not None and found[1] == alone().solve(keys()[1], math.inf, None)[1]
    small = alone(replace(SETUP, config=TrainConfig(memory_nbytes=1e3)))
    assert small.tighten(first, math.inf, None) is None and small.bound(first) == math.inf


def test_what_is_foreseen_anew_takes_the_place_of_what_waits(one: Workers) -> None:
    asked = bounds()
    with helped(one) as (_, ahead, _workers):
        ahead.foresee(asked)
        ahead.foresee(asked[-1:])
        assert asked[-1] in ahead._asked
        assert all(key == asked[-1] or not future.cancel() for key, future in ahead._asked.items())


def test_prices_of_memory_go_with_questions_and_answers(one: Workers) -> None:
    """What a byte is worth where one process found that the limit binds is where the other begins."""
    first, second, *_ = keys()
    plan, *_ = alone().solve(first, math.inf, None)
    setup = replace(SETUP, config=TrainConfig(memory_nbytes=0.8 * plan.estimate.peak_nbytes))
    with helped(one, setup) as (joint, ahead, _):
        joint.foresee([(first, Known.REFINED)], math.inf, None, True)
        joint.solve(first, math.inf, None)
        prices = joint._prices.of(1)
        assert any(price > 0 for price in prices.values())
        joint.foresee([(second, Known.REFINED)], math.inf, None, True)
        (asked,) = (one for one in ahead._asked if isinstance(one, Solving))
        assert asked.prices == prices
    twice = joint._prices.of(2)
    assert twice == {moment: pytest.approx(2 * price) for moment, price in prices.items()}


def test_what_is_excluded_by_what_came_since_is_not_asked_any_more() -> None:
    """A bound is worked at in between what is foreseen and when its turn comes."""
    joint, (first, *_) = alone(), keys()
    asked: list[Question] = []

    def answer(question: Question) -> object:
        asked.append(question)
        return joint.answer(question)

    joint._prefetch.here = answer
    while not joint.sharpen(first, math.inf):
        pass
    count, known = len(asked), joint.bound(first)
    assert count
    assert joint.sharpen(first, known)
    joint.refine(first, known)
    assert len(asked) == count and first not in joint._refined
    joint.refine(first, known * 1.5)
    assert len(asked) == count + 1


@pytest.mark.skipif(not spare_cores(), reason="no core for a process beside this one")
def test_what_was_started_ahead_serves_the_first_search_and_ends_with_it() -> None:
    with started(LARGE):
        first, second = spare_workers(), spare_workers()
        assert first is not None and second is not None and first is not second
        with first, second:
            assert all(process.poll() is None for process in (*first.processes, *second.processes))
    with started(LARGE), started(LARGE):  # one search follows
        pass
    with started(LARGE - 1):
        later = spare_workers()
        assert later is not None
        later.close()


@pytest.mark.skipif(not spare_cores(), reason="no core for a process beside this one")
def test_what_no_search_takes_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Workers] = []

    def make(module: str, count: int) -> Workers:
        made.append(Workers(module, count))
        return made[-1]

    monkeypatch.setattr(workers_module, "Workers", make)
    with pytest.raises(ValueError, match="no model"), started(LARGE):
        assert len(made) == 1
        raise ValueError("no model")
    assert all(process.returncode is not None for process in made[0].processes)
    with started(LARGE - 1):
        assert len(made) == 1
