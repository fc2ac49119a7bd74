"""What has one rank to do of an op? Seconds and bytes, which depend on nothing but into how many parts it is split.

So equal ops are worked out once for all meshes of the same devices, and for all choices that split them so.
"""

import math
from collections.abc import Sequence
from typing import TypedDict

from autopar.cost_models.compute import Rates
from autopar.lower.program import Op
from autopar.rules.rule import Local


def moved_nbytes(op: Op, sizes: Sequence[float], results: Sequence[float], kept: float) -> tuple[float, float]:
    """Bytes that forward and backward move: `kept` are those that autograd keeps beside operands and results."""
    read = _read_nbytes(op, sizes, results) + (kept if op.has_backward else 0.0)
    return read, _back_nbytes(op, op.operand_grads, sizes, results, kept)


def _read_nbytes(op: Op, sizes: Sequence[float], results: Sequence[float]) -> float:
    """Operands read and results written."""
    rule, written = op.rule, sum(results)
    read = sum(min(n, written) if i in rule.looked_up else n for i, n in enumerate(sizes))
    return rule.reads * read + written


def _back_nbytes(
    op: Op, grads: tuple[bool, ...], sizes: Sequence[float], results: Sequence[float], kept: float
) -> float:
    """What backward reads, and writes of operands with `grads`."""
    saved = sum(sizes[i] for i in op.rule.saves) + sum(results[i] for i in op.rule.saves_results)
    return saved + kept + sum(n for n, g in zip((*sizes, *results), grads + op.result_grads, strict=True) if g)


def forward_seconds(op: Op, sizes: list[int], results: list[int], local: Local, rates: Rates) -> float:
    """Of one rank."""
    rule, parts = op.rule, local.parts()
    if rule.product is not None:
        nbytes = sizes[rule.product.left] + sizes[rule.product.right] + sum(results)
        own = rule.product.sizes(local.operand_shapes, local.result_shapes)
        return rates.products([own], nbytes, op.dtype, rows=own[2:] if rule.product.in_rows else ())
    moved = moved_nbytes(op, sizes, results, rule.saves_nbytes / parts)[0]
    if rule.is_attention:
        return rates.attention(rule.flops / parts, moved, op.dtype, **_heads(op))
    return rates.other(rule.flops / parts, moved, op.dtype)


def backward_seconds(
    op: Op, grads: tuple[bool, ...], sizes: list[int], results: list[int], local: Local, rates: Rates
) -> float:
    """Of one rank, towards operands with `grads`."""
    rule, parts = op.rule, local.parts()
    if rule.product is not None:
        batch, m, n, k = rule.product.sizes(local.operand_shapes, local.result_shapes)
        nbytes = sizes[rule.product.left] + sizes[rule.product.right] + sum(results)
        gradients = {rule.product.left: (batch, m, k, n), rule.product.right: (batch, k, n, m)}
        wanted = [sizes for operand, sizes in gradients.items() if grads[operand]]
        return rates.products(wanted, nbytes, op.dtype, rows=(n, k) if rule.product.in_rows else ())
    moved = _back_nbytes(op, grads, sizes, results, rule.saves_nbytes / parts)
    flops = (2 * rule.flops if rule.backward_flops is None else rule.backward_flops) / parts
    if rule.is_attention:
        return rates.attention(flops, moved, op.dtype, **_heads(op), backward=True)
    return rates.other(flops, moved, op.dtype)


class _Heads(TypedDict):
    head: int
    keys: float
    every: float


def _heads(op: Op) -> _Heads:
    """Elements of attention's heads, how many keys a query sees on the average, half of them where it is causal, and
    how many there are."""
    query, key, value = op.operand_shapes[:3]
    pairs = op.rule.flops / (2.0 * max(query[-1] + value[-1], 1))
    return {"head": query[-1], "keys": pairs / max(math.prod(query[:-1]), 1), "every": key[-2]}
