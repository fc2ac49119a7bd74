"""Bags of rows: `table[vocabulary hidden], ids[bags.. place] -> [bags.. hidden]`, vocabulary and place summed.

Where bags are told by offsets, ids are one row of places, and which bag one is in is known only when the model runs:
bags stay whole. A table on one rank, another table on the next, sends what a split of every table's columns sends, and
is balanced only by luck: tables are split by rows or columns.
"""

from collections.abc import Callable
from typing import Any

from torch import fx

from autopar.ops.bags import bags
from autopar.rules.describe import all_float, dim_name, numel, shapes_of
from autopar.rules.kept import kept_by_autograd
from autopar.rules.rule import Call, Dims, Factor, Local, Rule
from autopar.values.graph import operands


def _bags(node: fx.Node) -> Rule:
    sources = operands(node)
    table, ids, *_ = shapes_of(sources)
    _, _, offsets, weights = node.args
    options: dict[str, Any] = dict(node.kwargs)
    mode, padded = options["mode"], options.get("padding_idx", -1) >= 0
    leading: Dims = tuple(dim_name(d) if size > 1 else None for d, size in enumerate(ids[:-1]))
    sizes = {"hidden": table[1]} | {n: ids[d] for d, n in enumerate(leading) if n}
    summed = {"vocabulary": table[0], "place": ids[-1]} if mode == "sum" or (mode == "mean" and not padded) else {}
    factors = {n: Factor(size=size, even=False) for n, size in sizes.items() if size > 1}
    factors |= {n: Factor(size=size, summed=True, even=n == "place") for n, size in summed.items() if size > 1}

    def named(*names: str | None) -> Dims:
        return tuple(n if n in factors else None for n in names)

    dims = [named("vocabulary", "hidden"), named(*leading, "place")]
    result = named(*leading, "hidden")
    if offsets is not None:
        dims.append((None,))
        result = (None, *named("hidden"))
    if weights is not None:
        dims.append(dims[1])

    def localize(local: Local) -> Call:
        kwargs: dict[str, Any] = dict(node.kwargs)
        if local.axes("vocabulary"):
            kwargs |= {"vocabulary": _axes(local, 0, 0), "size": table[0]}
        if local.axes("place"):
            kwargs |= {"places": _axes(local, 1, len(ids) - 1), "num_places": ids[-1]}
        return bags, node.args, kwargs

    saves, saves_results, nbytes = kept_by_autograd(node)
    work = float(numel(ids)) * table[1]
    linear = [i for i in (0, *((len(dims) - 1,) if weights is not None else ())) if mode != "max"]
    return Rule(
        factors=factors,
        operands=tuple(dims),
        results=(result,),
        linear=tuple(frozenset({i}) for i in linear if all_float(node, (sources[i],))),
        saves=saves,
        saves_results=saves_results,
        saves_nbytes=nbytes,
        flops=work,
        backward_flops=work if node.meta["requires_grad"] else 0.0,
        localize=localize,
        looked_up=frozenset({0}),
    )


def _axes(local: Local, operand: int, dim: int) -> tuple[str, ...]:
    return tuple(local.mesh.names[a] for a in local.operands[operand].axes_of(dim))


RULES: dict[Any, Callable[[fx.Node], Rule]] = {bags: _bags}
