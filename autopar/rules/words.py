"""What do people call a dim, and so a choice? Batch, sequence, heads, columns, rows, vocabulary.

Inputs name their dims by their rank and dtype; names travel through the factors of every rule: a factor takes the name
of a dim that it runs over, and gives it to the dims of the result. Rules that name a factor themselves (`heads`) win.
"""

import operator
import re
from collections.abc import Mapping

from torch import fx

from autopar.rules.registry import resolve, rule_of
from autopar.rules.rule import Rule
from autopar.values.graph import CapturedModel, operands

Tags = Mapping[str, tuple[str, ...]]
"""Node name -> the name of each dim of its (first) result, "" where none is known."""

SPOKEN = {"query": "sequence", "classes": "vocabulary"}
"""Names of factors that people call otherwise."""

WHOLE = "whole on every rank"
SUMMANDS = "as summands"

_UNNAMED = re.compile(r"dim\d+")


def dim_tags(captured: CapturedModel) -> dict[str, tuple[str, ...]]:
    """Names of the dims of every node's result (the first result's, where there are several).

    Inputs name batch and sequence; where they cannot (patches of an image), attention names its query's sequence, and
    the name travels backwards.
    """
    tags: dict[str, tuple[str, ...]] = {}
    inputs = {spec.placeholder for spec in captured.inputs}
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            shape, is_float = node.meta["val"].shape, node.meta["val"].dtype.is_floating_point
            tags[node.name] = _input_tags(len(shape), is_float) if node.name in inputs else ("",) * len(shape)
        elif node.op == "call_function":
            tags[node.name] = _result_tags(node, tags)
    for node in reversed(captured.graph.nodes):
        if node.op == "call_function" and node.target is not operator.getitem:
            rule = rule_of(node)
            named = factor_tags(node, rule, tags)
            for factor, tag in zip(rule.results[0], tags[node.name], strict=True):
                if factor is not None and tag in _TRAVELS_BACK:
                    named[factor] = named[factor] or tag
            for operand, dims in zip(operands(node), rule.operands, strict=True):
                if operand.op == "call_function":
                    tags[operand.name] = tuple(
                        tag or (named[factor] if factor is not None and named[factor] in _TRAVELS_BACK else "")
                        for factor, tag in zip(dims, tags[operand.name], strict=False)
                    )
    return tags


_TRAVELS_BACK = ("batch", "sequence", "heads")


def _result_tags(node: fx.Node, tags: Tags) -> tuple[str, ...]:
    producer, index = resolve(node) if node.target is operator.getitem else (node, 0)
    rule = rule_of(producer)
    named = factor_tags(producer, rule, tags)
    return tuple("" if factor is None else named[factor] for factor in rule.results[index])


def _input_tags(rank: int, is_float: bool) -> tuple[str, ...]:
    if not is_float:
        return ("batch", "sequence", *("",) * rank)[:rank]
    return {
        3: ("batch", "features", "time"),
        4: ("batch", "channels", "height", "width"),
    }.get(rank, ("batch", *("",) * rank)[:rank])


def factor_tags(node: fx.Node, rule: Rule, tags: Tags) -> dict[str, str]:
    """What people call each factor of a node's rule, "" where nothing names it."""
    named = {f: SPOKEN.get(f, "" if _UNNAMED.fullmatch(f) else f) for f in rule.factors}
    for operand, dims in zip(operands(node), rule.operands, strict=True):
        for factor, tag in zip(dims, tags[operand.name], strict=False):
            if factor is not None and not named[factor]:
                named[factor] = tag
    for factor, tag in zip(rule.results[0], tags.get(node.name, ()), strict=False):
        if factor is not None and not named[factor]:
            named[factor] = tag
    return named


def describe(node: fx.Node, choice_name: str, tags: Tags) -> str:
    """A choice in words: `split by heads`, `whole on every rank`, `as summands`."""
    if choice_name in ("replicate", "invariant"):
        return WHOLE
    rule = rule_of(node)
    if choice_name not in rule.factors:
        return SUMMANDS
    return f"split by {factor_tags(node, rule, tags)[choice_name] or choice_name}"
