"""Ranks that train on other data, with other optimizers or from other values, are told so."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import autopar
from autopar.errors import ArgumentError, RankError
from autopar.runtime import LocalBatch
from autopar.runtime.agreement import compare
from autopar.runtime.comparison import RankComparison, digest
from tests.ordinary_cases import batch, net, plan
from tests.process_group import ranks


def test_what_ranks_share_is_compared_among_those_that_have_it() -> None:
    facts = {rank: {"inputs": "the global batch"} for rank in range(3)}
    shared = {0: {"rows 0": "a"}, 1: {"rows 1": "b"}, 2: {"rows 0": "a"}}
    assert compare(facts, shared) == ""
    shared[2]["rows 0"] = "c"
    assert "rows 0: a on ranks [0], c on ranks [2]" in compare(facts, shared, "batch")
    assert "give every rank the same batch" in compare(facts, shared, "batch")
    assert "inputs: the global batch on ranks [0, 1], None on ranks [2]" in compare({**facts, 2: {}})


def test_the_first_step_and_a_few_others_are_compared() -> None:
    own = RankComparison()
    due = [own.count() for _ in range(120)]
    assert [step + 1 for step, one in enumerate(due) if one is not None] == [1, 10, 100]
    asked = RankComparison()
    asked.every = 4
    assert [step for step in range(1, 13) if asked.count() is not None] == [1, 4, 8, 10, 12]


def test_a_digest_is_of_names_sizes_and_values() -> None:
    value = torch.arange(12.0)
    digests = {digest([("x", one)], 8) for one in (value, value.view(3, 4), value.double(), value + 1, value[:10])}
    assert len(digests | {digest([("y", value)], 8)}) == 6
    assert digest([("x", value.bfloat16()), ("n", torch.tensor(True))], 4)


@contextmanager
def told(*words: str) -> Iterator[None]:
    with pytest.raises(RankError) as caught:
        yield
    assert all(word in str(caught.value) for word in words), str(caught.value)


def differing() -> None:
    rank = int(os.environ["RANK"])
    with pytest.raises(ArgumentError, match="at least 1"):
        autopar.distribute(net(), plan("ddp"), compare_every=0)
    module = autopar.distribute(net(), plan("ddp"), compare_every=1)
    with told("values of inputs (a rank's own rows are given as autopar.LocalBatch)", "batch, optimizer and values"):
        module(**batch(rank))
    with told("inputs: the global batch on ranks [0], a rank's own rows on ranks [1]"):
        module(LocalBatch({name: value[:4] for name, value in batch().items()})) if rank else module(**batch())
    module(**batch()).backward()
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1 * (rank + 1))
    optimizer.step()
    with told("optimizer: AdamW(", "lr=0.1", "parameter groups of pipeline rank 0: lr 0.1 (", "lr 0.2 ("):
        module(**batch())
    with torch.no_grad():
        module.get_parameter("a.bias").fill_(rank)
    with told("values of parameters of pipeline rank 0 (whole)"):
        module(**batch())
    alike = autopar.distribute(net(), plan("fsdp"))
    for step in range(3):  # other rows a rank, and a step that is not compared
        rows = slice(4 * rank, 4 * rank + 4)
        alike(LocalBatch({name: value[rows] for name, value in batch(step).items()})).backward()


def test_what_differs_on_ranks_is_an_error_on_all() -> None:
    ranks(2).run(differing)


def same_rows() -> None:
    """Ranks that compute on the same rows must be given the same rows."""
    rank = int(os.environ["RANK"])
    module = autopar.distribute(net(), plan("tensor"))
    own = module.local_batch(batch(int(rank == 3)))  # type: ignore[operator]
    assert str(module.plan.layouts["y"]) == "R,S1"  # type: ignore[union-attr,index]
    with told("values of input y of ranks at model 1: "):
        module(own)


def test_ranks_with_the_same_rows_are_given_the_same() -> None:
    ranks(4).run(same_rows)
