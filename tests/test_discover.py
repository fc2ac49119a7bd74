"""Running an op shows its factors: all of them, and never one that it does not have."""

import ctypes
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from autopar.rules.registry import rule_of
from autopar.rules.rule import Rule, choices, splits
from autopar.values.placement import PARTIAL, REPLICATE, Placement, Shard
from tests.op_sample import Input, Sample, X, aten
from tests.unknown_ops import on, unknown

Dims = set[tuple[tuple[Placement, ...], tuple[Placement, ...]]]


def found(rule: Rule) -> Dims:
    return {(c.operands, c.results) for c in choices(rule) if splits(c.name)}


def random_op(seed: int) -> tuple[Sample, Dims]:
    """An einsum of random letters, perhaps with a bias, of which one letter may be normalised over; and its splits."""
    draw = random.Random(seed)
    sizes = {c: draw.choice((4, 4, 5, 6, 40, 96)) for c in "abcde"}
    terms = ["".join(draw.sample("abcde", draw.randint(1, 3))) for _ in range(draw.randint(1, 3))]
    used = sorted({c for term in terms for c in term})
    result = "".join(draw.sample(used, draw.randint(1, min(3, len(used)))))
    bias = "".join(c for c in result if draw.random() < 0.5) if draw.random() < 0.5 else ""
    ending = draw.choice(("linear", "linear", "softmax", "tanh"))
    equation = f"{','.join(terms)}->{result}"
    given = [*terms, bias] if bias else terms
    spread = tuple(slice(None) if c in bias else None for c in result)

    def function(*operands: Tensor) -> Tensor:
        value = torch.einsum(equation, *operands[: len(terms)])
        if bias:
            value = value + operands[-1][spread]
        return value.softmax(-1) if ending == "softmax" else value.tanh() if ending == "tanh" else value

    named = {1: lambda x: function(x), 2: lambda x, y: function(x, y), 3: lambda x, y, z: function(x, y, z)}
    named[4] = lambda x, y, z, w: function(x, y, z, w)
    sample = on(unknown(named[len(given)]), *(tuple(sizes[c] for c in term) for term in given))

    def place(term: str, letter: str) -> Placement:
        return Shard(term.index(letter)) if letter in term else REPLICATE

    expected: Dims = set()
    for letter in used:
        operands = tuple(place(term, letter) for term in terms)
        if letter not in result:
            if ending == "linear":
                expected.add(((*operands, PARTIAL) if bias else operands, (PARTIAL,)))
        elif not (ending == "softmax" and letter == result[-1]):
            expected.add(((*operands, place(bias, letter)) if bias else operands, (place(result, letter),)))
    return sample, expected


@pytest.mark.parametrize("seed", range(8))
def test_the_factors_of_a_random_op_are_found(seed: int) -> None:
    sample, expected = random_op(seed)
    rule = rule_of(sample.node())
    assert rule.discovered
    assert found(rule) == expected


def ranges(x: Tensor) -> Tensor:
    return torch.arange(x.shape[0], dtype=x.dtype, device=x.device)[:, None]


JOINED: dict[str, Callable[[Tensor], Tensor]] = {
    "each row and those before": lambda x: x.cumsum(0),
    "the mean": lambda x: x.mean(0),
    "less the mean": lambda x: x - x.mean(0),
    "the first row": lambda x: x - x[:1],
    "the largest": lambda x: x / x.abs().amax(0),
    "the sign of the sum": lambda x: torch.where(x.sum(0) > 0, x, -x),
    "a rare condition": lambda x: torch.where(x.abs().amax(0) > 30, x, 2 * x),
    "clipped": lambda x: x * (1 / x.norm(dim=0).clamp(min=50)),
    "in order": lambda x: x.sort(0).values,
    "turned round": lambda x: x.flip(0),
    "pairs exchanged": lambda x: x.unflatten(0, (-1, 2)).flip(1).flatten(0, 1),
    "its place": lambda x: x * ranges(x),
    "its place, late": lambda x: x * (1 + (ranges(x) >= 64)),
    "how many there are": lambda x: x / x.shape[0],
    "whether there are many": lambda x: x * (2 if x.shape[0] > 100 else 1),
    "moved far": lambda x: x.roll(64, 0),
    "moved far, with zeros": lambda x: torch.nn.functional.pad(x, (0, 0, 64, 0))[: x.shape[0]],
    "in blocks": lambda x: x.unflatten(0, (-1, 64)).cumsum(1).flatten(0, 1) if x.shape[0] % 64 == 0 else x.cumsum(0),
    "the product": lambda x: x.prod(0),
}


@pytest.mark.parametrize("name", JOINED)
def test_what_joins_rows_is_not_split_along_them(name: str) -> None:
    rule = rule_of(on(unknown(lambda x: JOINED[name](x)), (1024, 6)).node())
    assert rule.operands[0][0] is None
    assert rule.operands[0][1] is not None and not rule.factors[rule.operands[0][1]].summed


def test_what_nothing_shows_is_not_linear() -> None:
    """Drawn targets are neither 1 nor -1, so that the loss is 0 whatever else it is of."""
    sources = on(torch.ops.aten.cosine_embedding_loss.default, (8, 4), (8, 4), (8,))
    assert rule_of(sources.node()).linear == ()


def test_dims_of_other_sizes_are_split_together() -> None:
    def repeated(x: Tensor) -> Tensor:
        return x.repeat_interleave(3, 0)

    rule = rule_of(on(unknown(repeated), (256, 6)).node())
    name = rule.operands[0][0]
    assert name is not None and rule.results[0][0] == name and rule.factors[name].size == 256


def test_integers_are_places_and_bools_are_complemented() -> None:
    def picked(x: Tensor, places: Tensor, mask: Tensor) -> Tensor:
        return torch.where(mask, x.gather(1, places), 0.0)

    inputs = (Input(shape=(8, 6)), Input(shape=(8, 5), kind="ids", high=6), Input(shape=(8, 5), kind="bool"))
    rule = rule_of(Sample(name="", target=unknown(picked), args=(X(0), X(1), X(2)), inputs=inputs).node())
    rows: tuple[Placement, ...] = (Shard(0),) * 3
    assert found(rule) == {(rows, (Shard(0),)), ((REPLICATE, Shard(1), Shard(1)), (Shard(1),))}


def test_what_is_scattered_is_added_to_summands() -> None:
    inputs = (Input(shape=(7, 6)), Input(shape=(9,), kind="ids", high=7), Input(shape=(9, 6)))

    def collected(x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        return x.index_add(0, places, values)

    rule = rule_of(Sample(name="", target=unknown(collected), args=(X(0), X(1), X(2)), inputs=inputs).node())
    assert ((PARTIAL, Shard(0), Shard(0)), (PARTIAL,)) in found(rule)
    assert ((Shard(1), REPLICATE, Shard(1)), (Shard(1),)) in found(rule)
    assert rule.linear == (frozenset({0, 2}),)


def test_an_op_that_ends_its_process_is_whole() -> None:
    def falls(x: Tensor) -> Tensor:
        if not x.is_meta:
            ctypes.string_at(0)
        return x * 2

    rule = rule_of(on(unknown(falls), (8, 6)).node())
    assert not rule.known and not rule.factors


def test_an_op_that_draws_or_writes_is_whole() -> None:
    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    def writes(x: Tensor) -> Tensor:
        x.detach().mul_(2)
        return x.clone()

    assert not rule_of(on(unknown(noisy), (8, 6)).node()).factors
    assert not rule_of(on(unknown(writes), (8, 6)).node()).factors


def test_a_written_rule_comes_first() -> None:
    sample = Sample(name="", target=aten.linear.default, args=(X(0), X(1)), inputs=(Input(shape=(4, 6)),) * 2)
    assert not rule_of(sample.node()).discovered
