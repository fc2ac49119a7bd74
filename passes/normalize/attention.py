"""What does attention mask, and how many key heads are there? Read off constants and repeats; then one form of call.

`scaled_dot_product_attention(q, k, v, mask, dropout_p=0.0, is_causal=..., scale=..., enable_gqa=...)`, or
`autopar.ops.attention` with a `site` where attention weights are dropped. `mask` is none or is added.

Every backend of torch (aten/src/ATen/native/transformers/attention.cpp) adds a mask: of a boolean one each call makes
such a copy, as large as the mask is where the call runs, and keeps it for backward. Made once in the graph it is shared
by the calls that read it, counted, and split by itself. 0 and -inf are what torch makes of it, but for cuDNN's kernel,
which some releases give -65504 for -inf: there a row that sees nothing is an average of all, here 0, as elsewhere.
"""

from typing import Any

import torch
from torch import Tensor, fx

from autopar.ops.attention import attention
from autopar.passes.graph_tools import aten, calls, insert, rewrite
from autopar.passes.normalize.random import UNNUMBERED
from autopar.values.graph import CapturedModel, dtype_of, shape_of

SDPA = aten.scaled_dot_product_attention.default


def normalize_attention(captured: CapturedModel) -> CapturedModel:
    """An all-true mask becomes none, a lower triangle `is_causal`, repeated key and value heads `enable_gqa`, any other
    boolean mask one to add."""
    kinds: dict[str, str] = {}
    added: dict[tuple[fx.Node, torch.dtype], fx.Node] = {}
    for node in calls(captured.graph, SDPA):
        given: list[Any] = [*node.args, *(None, 0.0, False)[len(node.args) - 3 :]]
        query, key, value, mask, dropout_p, is_causal = given
        options: dict[str, Any] = {
            "is_causal": bool(is_causal),
            "scale": node.kwargs.get("scale"),
            "enable_gqa": bool(node.kwargs.get("enable_gqa", False)),
        }
        if isinstance(mask, fx.Node) and mask.name in captured.constants:
            if mask.name not in kinds:
                kinds[mask.name] = mask_kind(captured.constants[mask.name])
            kind = kinds[mask.name]
            square = shape_of(query)[-2] == shape_of(key)[-2]
            if kind == "all" or (kind == "causal" and square):
                options["is_causal"] = kind == "causal"
                mask = None
        grouped = ungrouped(key), ungrouped(value)
        repeated = grouped[0] is not None and grouped[1] is not None and shape_of(query)[1:2] == shape_of(key)[1:2]
        if repeated and not options["enable_gqa"]:
            (key, value), options["enable_gqa"] = grouped, True
        if isinstance(mask, fx.Node) and dtype_of(mask) == torch.bool:
            dtype = dtype_of(query)
            if (mask, dtype) not in added:
                added[mask, dtype] = to_add(mask, dtype)
            mask = added[mask, dtype]
        if dropout_p:
            options = {"dropout_p": float(dropout_p), **options, "site": UNNUMBERED}
            rewrite(node, attention, (query, key, value, mask), options)
        else:
            rewrite(node, SDPA, (query, key, value, mask), {"dropout_p": 0.0, **options})
    return captured


def mask_kind(mask: Tensor) -> str:
    """`all` if nothing is masked, `causal` if exactly the future is, else `other`. Masks are boolean or added."""
    if mask.dtype is torch.bool:
        keep = mask
    else:
        keep = mask == 0
        hidden = mask[~keep]
        if not bool((hidden <= torch.finfo(mask.dtype).min).all()):
            return "other"
    if bool(keep.all()):
        return "all"
    if keep.dim() < 2:
        return "other"
    *leading, rows, columns = keep.shape
    if rows != columns or any(size != 1 for size in leading):
        return "other"
    position = torch.arange(rows)
    past = position[None, :] <= position[:, None]
    return "causal" if torch.equal(keep.reshape(rows, columns), past) else "other"


def to_add(mask: fx.Node, dtype: torch.dtype) -> fx.Node:
    """`log` of a boolean mask, 0 where it holds and -inf where not, beside it and of the same module."""
    anchor = mask.next
    while anchor.op == "placeholder":
        anchor = anchor.next
    cast = insert(anchor, aten._to_copy.default, (mask,), {"dtype": dtype})
    made = insert(anchor, aten.log.default, (cast,))
    cast.meta["module"] = made.meta["module"] = mask.meta["module"]
    return made


def ungrouped(node: Any) -> Any:
    """`[b, g, s, d]` of a tensor whose heads are those repeated: reshape(expand(unsqueeze(x, 2))); None otherwise."""
    if node.target is not aten.reshape.default or node.args[0].target is not aten.expand.default:
        return None
    expanded = node.args[0]
    single = expanded.args[0]
    if single.target is not aten.unsqueeze.default or single.args[1] != 2 or len(shape_of(node)) != 4:
        return None
    source = single.args[0]
    batch, groups, length, width = shape_of(source)
    repeats = shape_of(expanded)[2]
    if shape_of(expanded) != (batch, groups, repeats, length, width):
        return None
    return source if shape_of(node) == (batch, groups * repeats, length, width) else None
