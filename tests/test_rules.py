"""A rule is right if the op on shards, put together by the placements' law, is the op: values and gradients."""

import itertools
import random

import pytest
from torch import fx

from autopar.rules.registry import rule_of
from autopar.rules.rule import Choice, Rule, choices, is_splittable
from autopar.values.mesh import Mesh, make_mesh
from tests.op_sample import Input, Sample, X, aten
from tests.op_samples import SAMPLES
from tests.rules_on_ranks import check_node, one_after_the_other, sampled_call, sends

Case = tuple[Mesh, tuple[Choice, ...]]


def cases(node: fx.Node, rule: Rule, communicates: bool) -> list[Case]:
    """Every splittable combination of choices whose body sends (or does not send) anything."""
    out = []
    for mesh in (make_mesh((2,)), make_mesh((3,)), make_mesh((2, 2))):
        for chosen in itertools.product(choices(rule), repeat=mesh.num_axes):
            if is_splittable(rule, chosen, mesh) and sends(node, rule, chosen, mesh) == communicates:
                out.append((mesh, chosen))
    return out


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
def test_op_on_shards_is_the_op(sample: Sample) -> None:
    node, wholes = sampled_call(sample)
    for mesh, chosen in cases(node, rule_of(node), communicates=False):
        try:
            check_node(node, wholes, mesh, chosen, one_after_the_other)
        except Exception as error:
            raise AssertionError(f"{mesh.shape} {[c.name for c in chosen]}: {error}") from error


def random_sample(seed: int) -> Sample:
    """A reshape between random factorisations of one size, a broadcast sum, or a linear, of random shapes."""
    draw = random.Random(seed)
    primes = [draw.choice((1, 2, 2, 3, 3, 4)) for _ in range(5)]
    source, target = regrouped(primes, draw), regrouped(primes, draw)
    kind = seed % 3
    if kind == 0:
        inputs = (Input(shape=source),)
        return Sample(name="", target=aten.reshape.default, args=(X(0), list(target)), inputs=inputs)
    if kind == 1:
        other = tuple(draw.choice((1, size)) for size in source[draw.randrange(len(source)) :])
        inputs = (Input(shape=source), Input(shape=other))
        return Sample(name="", target=draw.choice((aten.add.Tensor, aten.mul.Tensor)), args=(X(0), X(1)), inputs=inputs)
    columns = draw.randint(1, 8)
    inputs = (Input(shape=source), Input(shape=(columns, source[-1])), Input(shape=(columns,)))
    return Sample(name="", target=aten.linear.default, args=(X(0), X(1), X(2)), inputs=inputs)


def regrouped(primes: list[int], draw: random.Random) -> tuple[int, ...]:
    """The product of `primes` as dims: neighbours multiplied at random, ones put in at random."""
    out = [1]
    for prime in primes:
        if draw.random() < 0.5:
            out.append(1)
        out[-1] *= prime
    return tuple(out)


@pytest.mark.parametrize("seed", range(45))
def test_random_shapes_on_shards_are_the_op(seed: int) -> None:
    test_op_on_shards_is_the_op(random_sample(seed))
