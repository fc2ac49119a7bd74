"""What stages of whole blocks take at least, however they are cut: below every cut, whatever blocks take and decide."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np
import pytest

from autopar.lower.program import Program, make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.search.costs.folding import fold_program
from autopar.search.costs.paid import Around, Fewest, stages_of, whole_readers
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.ilp import solve
from autopar.search.graph.build import build
from autopar.search.graph.extract import extract
from autopar.search.joint.uneven_stages import grouped, uneven_seconds
from autopar.search.meshes import parts
from autopar.search.staged.rounds import least_uneven
from autopar.search.staged.stages import priced, staged, starts_of
from autopar.search.staged.whole_blocks import runs_of_stages
from autopar.values.mesh import make_mesh
from autopar.values.plan import Plan, TrainConfig
from tests.search_cases import machine, small_llama
from tests.zoo_graphs import zoo_graph

DEVICES = 2
"""Of a stage."""


@pytest.mark.parametrize("seed", range(4))
def test_no_cut_takes_less_than_the_least_sum_of_its_runs(seed: int) -> None:
    """Of whatever blocks; and of those that they are chosen by it is nearly what the best cut takes."""
    draw, nearness = np.random.default_rng(seed), []
    for _ in range(150):
        num_blocks = int(draw.integers(1, 24))
        p, m = int(draw.integers(1, num_blocks + 1)), int(draw.integers(1, 30))
        schedule = str(draw.choice(["1f1b", "gpipe"]))
        known, other = draw.uniform(0.1, 1.0, num_blocks), draw.uniform(0.0, 1.0, num_blocks) ** 4
        runs = runs_of_stages(known, schedule, p, m)
        weights = np.array([run.weights(num_blocks) for run in runs])
        assert len(runs) == p and weights.min() >= 0.0
        best = least_uneven(known, schedule, p, m)
        assert (weights @ known).min() <= best * (1 + 1e-9)
        assert (weights @ other).min() <= least_uneven(other, schedule, p, m) * (1 + 1e-9)
        nearness.append((weights @ known).min() / best)
    assert np.mean(nearness) > 0.97
    assert runs_of_stages(np.ones(p - 1), schedule, p, m) == ()


@cache
def program(family: str, microbatches: int) -> Program:
    if family == "llama":
        return make_program(small_llama(5, 8, microbatches))
    return make_program(
        accumulate_gradients(zoo_graph(family, 2), microbatches, lambda: zoo_graph(family, 2 * microbatches))
    )


@cache
def pricer(_: Program) -> Pricer:
    """One for each program."""
    return make_pricer(mesh=make_mesh((DEVICES,)), cluster=parts(machine(2 * DEVICES))[2], config=TrainConfig())


def test_a_tensor_counts_as_often_as_the_part_that_counts_least_of_those_that_read_it() -> None:
    """Or as the run, where that reads it in all ways in which it is read at all."""
    draw, straddling = np.random.default_rng(0), 0
    for family in ("llama", "gpt2", "t5"):
        whole = program(family, 2)
        folding, kinds = fold_program(whole), [tuple(whole.tensors)[i::7] for i in range(7)]
        for _ in range(20):
            begins = np.sort(draw.integers(0, len(whole.ops) + 1, 2)).tolist()
            around = Around(part_of=stages_of(begins, len(whole.ops)), passing=draw.uniform(0.0, 3.0, 3))
            for names in kinds:
                passing, once = 0.0, 0
                for name in names:
                    read = sorted({int(around.part_of[p]) for p, _ in whole.readers[name]})
                    if len(read) > 1 and 1 in (whole_readers(whole, folding, around.part_of, name) or ()):
                        read, straddling = [1], straddling + 1
                    passing += min((float(around.passing[part]) for part in read), default=0.0)
                    once += read == [1]
                found = around.of_tensors(names, whole, folding)
                assert found == pytest.approx((passing, passing, min(once, passing)))
    assert straddling


def alike(family: str, microbatches: int, draw: np.random.Generator) -> Plan:
    """A plan whose equal blocks decide alike: the best one where each choice takes some random time more."""
    whole = program(family, microbatches)
    own = pricer(whole)
    problem = build(whole, own, limit=None)
    nodes = tuple(
        replace(node, seconds=node.seconds * draw.lognormal(0.0, 2.0, len(node.seconds)))
        for node in problem.graph.nodes
    )
    found = solve(replace(problem.graph, nodes=nodes), relative_gap=1e-2)
    return extract(problem, found, own.cluster, own.config, "ilp")


@pytest.mark.parametrize(
    ("family", "p", "m", "schedule"),
    [("llama", 2, 4, "1f1b"), ("gpt2", 2, 4, "gpipe"), ("t5", 2, 4, "gpipe"), ("t5", 2, 2, "1f1b")],
)
def test_no_plan_takes_less_however_it_is_cut(family: str, p: int, m: int, schedule: str) -> None:
    """Random plans, every cut or some; tensors that many blocks read are there too (T5's encoder)."""
    whole, own = program(family, m), pricer(program(family, m))
    draw, cluster = np.random.default_rng(p + m), machine(p * DEVICES)
    least = uneven_seconds(whole, own, schedule, p, m, cutoff=0.0)
    assert uneven_seconds(whole, own, schedule, p, m, cutoff=2 * least) == 0.0 < least
    every = list(combinations(starts_of(whole), p - 1))
    random.Random(0).shuffle(every)
    seen = []
    for _ in range(4):
        plan = alike(family, m, draw)
        for cuts in every[:5]:
            made, stages = staged(plan, whole, own, p, schedule, cuts)
            seen.append(priced(made, stages, cluster, own.cluster).estimate.step_seconds)
    assert min(seen) >= least * (1 - 1e-6)
    assert min(seen) < 3 * least  # it says something


def _counts(paid: Around | Fewest, instances: Sequence[Sequence[int]]) -> float:
    return paid.of_ops(np.array(instances))[0]


def test_runs_together_count_no_op_more_often_than_any_of_them() -> None:
    whole = program("llama", 4)
    draw = np.random.default_rng(0)
    num_ops = len(whole.ops)
    around = [Around(part_of=np.sort(draw.integers(0, 3, num_ops)), passing=draw.uniform(0, 3, 3)) for _ in range(6)]
    groups = grouped(around, np.ones(num_ops), draw.integers(0, 4, num_ops) % 4)
    assert sorted(map(id, around)) == sorted(id(one) for among in groups for one in among)
    for among in groups:
        for _ in range(10):
            instances = [draw.integers(0, num_ops, 2).tolist() for _ in range(3)]
            assert _counts(Fewest(tuple(among)), instances) == min(_counts(one, instances) for one in among)
    alike = [replace(around[0]), replace(around[0])]
    assert len(grouped(alike, np.ones(num_ops), np.arange(num_ops))) == 1
