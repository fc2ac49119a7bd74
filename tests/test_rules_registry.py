"""Lookup of rules: every target once, getitem resolved, the unknown replicated and said to be so."""

import operator

import torch

from autopar.ops.batch_norm import batch_norm
from autopar.rules import (
    attention,
    bags,
    convolution,
    creation,
    discovered,
    einsum,
    elementwise,
    embedding,
    grouped_linear,
    linear,
    loss,
    normalization,
    recurrent,
    reductions,
    scatter,
    views,
)
from autopar.rules import random as random_rules
from autopar.rules.registry import RULES, resolve, result_index, rule_of
from autopar.rules.rule import choices, is_splittable
from autopar.values.mesh import make_mesh
from tests.op_sample import Input, Sample, X
from tests.op_samples import SAMPLES

MODULES = (
    *(
        attention,
        bags,
        convolution,
        creation,
        discovered,
        einsum,
        elementwise,
        embedding,
        grouped_linear,
        linear,
        loss,
        normalization,
    ),
    *(random_rules, recurrent, reductions, scatter, views),
)
aten = torch.ops.aten


def sample(name: str) -> Sample:
    return next(s for s in SAMPLES if s.name == name)


def test_no_target_has_two_rules() -> None:
    assert sum(len(module.RULES) for module in MODULES) == len(RULES)


def test_every_name_is_an_op_of_aten() -> None:
    for key in RULES:
        if isinstance(key, str):
            assert isinstance(operator.attrgetter(key.removeprefix("aten."))(aten), torch._ops.OpOverload), key


def test_an_op_without_a_rule_is_whole_and_says_so() -> None:
    rule = rule_of(sample("histc (no rule)").node())
    assert not rule.known
    assert [c.name for c in choices(rule)] == ["replicate", "invariant"]


def test_getitem_is_a_result_of_its_producer() -> None:
    node = sample("batch_norm").node()
    items = sorted(node.users, key=result_index)
    assert node.target is batch_norm
    assert [resolve(item) for item in items] == [(node, 0), (node, 1), (node, 2)]
    assert resolve(node) == (node, 0)
    assert rule_of(items[0]).alias == 0


def test_factors_are_words_that_a_person_knows() -> None:
    named = {
        "linear.default 4x6x12 10x12 10": {"dim0", "dim1", "columns", "rows"},
        "sdpa grouped": {"batch", "heads", "query"},
        "embedding.default 12x6 4x5": {"dim0", "dim1", "vocabulary", "hidden"},
        "cross_entropy 4x6x12 5 ignored reduction=mean": {"dim0", "dim1", "classes"},
        "conv1d": {"batch", "columns", "rows"},
    }
    for name, factors in named.items():
        assert set(rule_of(sample(name).node()).factors) == factors


def test_uneven_splits_are_offered_only_where_padding_is_harmless() -> None:
    def splits(target, *args, shape: tuple[int, ...] = (7, 6)) -> bool:
        node = Sample(name="", target=target, args=(X(0), *args), inputs=(Input(shape=shape),)).node()
        rule = rule_of(node)
        chosen = [c for c in choices(rule) if c.name == "dim0"]
        return bool(chosen) and is_splittable(rule, (chosen[0],), make_mesh((2,)))

    assert splits(aten.gelu.default)
    assert splits(aten.softmax.int, -1)
    assert not splits(aten.log.default)
    assert not splits(aten.pow.Tensor_Scalar, -0.5)
    assert not splits(aten.sum.dim_IntList, [0])
    assert not splits(aten.reshape.default, [42])


def test_attention_is_not_padded_along_its_mask() -> None:
    """A padded mask may hide every key from a row, and its softmax would be NaN."""
    masked, plain = rule_of(sample("sdpa float mask").node()), rule_of(sample("sdpa plain").node())
    assert {n: f.even for n, f in plain.factors.items()} == {"batch": False, "heads": False, "query": False}
    assert {n: f.even for n, f in masked.factors.items()} == {"batch": False, "heads": True, "query": True}


def test_rsqrt_of_a_mean_square_and_epsilon_may_be_padded() -> None:
    node = Sample(name="", target=aten.pow.Tensor_Scalar, args=(X(0), 2), inputs=(Input(shape=(7, 6)),)).node()
    for target, args in ((aten.mean.dim, ([1], True)), (aten.add.Tensor, (1e-6,)), (aten.rsqrt.default, ())):
        value = target(node.meta["val"], *args)
        node = node.graph.call_function(target, (node, *args))
        node.meta.update(val=value, requires_grad=True)
    assert not rule_of(node).factors["dim0"].even
    node.args = (node.args[0].args[0],)
    assert rule_of(node).factors["dim0"].even
