"""Attention: `q[batch heads query d], k[batch heads k d], v[batch heads k e], mask[.. query k]` -> as q, of size e.

With fewer key/value heads than query heads the factor runs over key/value heads, each with its group of query heads. A
split query keeps key and value whole (`Replicate`); causal, it needs its offset in the whole and so a body. Keys cannot
be split yet (a ring). The op is linear in the value.

A mask that needs a gradient (T5's relative positions) keeps torch from its fused kernel on a CPU
(aten/src/ATen/native/transformers/sdp_utils_cpp.cpp), and so do on a GPU float64, and fewer key heads than query heads
in float32 (cuda/sdp_utils.cpp there): two products with a softmax between keep the weights.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from autopar.ops.attention import attention
from autopar.rules.describe import all_float, argument, grads_of, numel, shapes_of, statistics_size
from autopar.rules.rule import Call, Dims, Factor, Local, Rule, replicated_rule
from autopar.values.graph import operands, requires_grad

# Forward is two matrix products; backward five, as flash kernels compute the weights again.
BACKWARD_RATIO = 2.5


def attention_rule(node: fx.Node) -> Rule:
    """Rule of aten's scaled dot product attention and of `ops.attention` (with dropout)."""
    sources = operands(node)
    shapes = shapes_of(sources)
    q, k, v = shapes[:3]
    randomly = node.target is not attention and argument(node, 4, "dropout_p", 0.0) > 0
    if len(q) not in (3, 4) or not len(q) == len(k) == len(v) or randomly:
        return replicated_rule(tuple(map(len, shapes)), (len(q),))
    leading = ("batch", "heads")[: len(q) - 2]
    kv_heads = k[1] if len(q) == 4 else 1
    whole = (*q[:-1], v[-1])
    factors = {"batch": Factor(size=q[0], even=False), "query": Factor(size=q[-2], even=False)}
    if len(q) == 4:
        factors["heads"] = Factor(size=kv_heads, even=kv_heads != q[1])
    for name, size in zip((*leading, "query"), q[:-1], strict=True):
        if size == 1 or (name == "heads" and q[1] % max(kv_heads, 1)):
            factors.pop(name)
    query: Dims = tuple(n if n in factors else None for n in (*leading, "query"))
    dims = [(*query, None), _key_dims(query, q, k), _key_dims(query, q, v)]
    if len(sources) == 4:
        mask = _mask_dims(query, q, shapes[3])
        # a padded mask may hide every key, and a softmax over nothing is NaN
        factors.update({n: Factor(size=factors[n].size) for n in mask if n is not None})
        dims.append(mask)
    flops = 2.0 * numel(q[:-1]) * k[-2] * (q[-1] + v[-1]) / (2 if _is_causal(node) else 1)
    graded = any(grads_of(sources))
    dtype = sources[0].meta["val"].dtype
    saved, kept = tuple(range(len(sources))), numel(whole[:-1]) * statistics_size(dtype)
    weights = numel((*q[:-1], k[-2])) * dtype.itemsize
    return Rule(
        factors=factors,
        operands=tuple(dims),
        results=((*query, None),),
        linear=(frozenset({2}),) if all_float(node, sources[2:3]) else (),
        saves=saved if graded else (),
        saves_results=(0,) if graded else (),
        saves_nbytes=kept if graded else 0,
        products_nbytes=weights,
        products_on_host=len(sources) == 4 and requires_grad(sources[3]),
        products_on_gpu=dtype == torch.float64 or (dtype == torch.float32 and len(q) == 4 and kv_heads != q[1]),
        flops=flops,
        backward_flops=BACKWARD_RATIO * flops if graded else 0.0,
        localize=_localize,
        is_attention=True,
    )


def _key_dims(query: Dims, q: tuple[int, ...], k: tuple[int, ...]) -> Dims:
    """Batch of key or value where it is not broadcast, and heads (fewer than those of q where grouped)."""
    leading = tuple(n if k[d] == q[d] or n == "heads" else None for d, n in enumerate(query[:-1]))
    return (*leading, None, None)


def _mask_dims(query: Dims, q: tuple[int, ...], mask: tuple[int, ...]) -> Dims:
    offset = len(q) - len(mask)
    aligned = (*query, None)
    return tuple(
        aligned[offset + d] if d < len(mask) - 1 and size == q[offset + d] else None for d, size in enumerate(mask)
    )


def _is_causal(node: fx.Node) -> bool:
    return bool(argument(node, 5, "is_causal", False))


def _localize(local: Local) -> Call:
    node = local.node
    split_query = local.axes("query")
    random = node.target is attention
    kwargs: dict[str, Any] = {}
    if split_query and _is_causal(node):
        axes = local.operands[0].axes_of(len(local.operand_shapes[0]) - 2)
        kwargs = {"query_axes": tuple(local.mesh.names[a] for a in axes), "query_size": _size(node, -2)}
    if random and (shards := _weight_shards(local)):
        kwargs |= {"shape": _weights_shape(node), "shards": shards}
    if not kwargs:
        return node.target, node.args, dict(node.kwargs)  # type: ignore[return-value]
    mask = argument(node, 3, "attn_mask" if not random else "mask")
    return (
        attention,
        (*node.args[:3], mask),
        {
            "dropout_p": argument(node, 4, "dropout_p", 0.0),
            "is_causal": _is_causal(node),
            "scale": node.kwargs.get("scale"),
            "enable_gqa": node.kwargs.get("enable_gqa", False),
            "site": node.kwargs.get("site", -1),
            **kwargs,
        },
    )


def _size(node: fx.Node, dim: int) -> int:
    size: int = operands(node)[0].meta["val"].shape[dim]
    return size


def _weights_shape(node: fx.Node) -> tuple[int, ...]:
    q, k = shapes_of(operands(node))[:2]
    return (*q[:-1], k[-2])


def _weight_shards(local: Local) -> tuple[tuple[str, int], ...]:
    """The attention weights `[.., query, k]` are split as the query is."""
    layout = local.operands[0]
    return tuple((local.mesh.names[a], d) for d in layout.sharded_dims() for a in layout.axes_of(d))


RULES: dict[Any, Callable[[fx.Node], Rule]] = {
    "aten.scaled_dot_product_attention.default": attention_rule,
    attention: attention_rule,
}
