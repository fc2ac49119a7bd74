"""In which order do a mixture's rows stand in the graph? In that of the tokens.

Hugging Face sorts rows by expert, multiplies them group by group and puts them back. The order is a permutation of the
whole batch, which no rank can tell from its own tokens: split, such a graph could only run whole. Each value in the
order of the experts has a counterpart in that of the tokens, `[tokens.., k, ...]` for `[tokens * k, ...]`, and every
op between treats its rows alike, so that the graph is rewritten value by value. Products sort for themselves
(`autopar.ops.grouped_linear`).
"""

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.ops.grouped_linear import grouped_linear
from autopar.passes.graph_tools import aten, calls, insert, results, substitute
from autopar.passes.normalize.linear import leading_dims
from autopar.values.graph import CapturedModel, operands, shape_of, target_name

PRODUCTS = frozenset({"transformers.grouped_mm_fallback.default", "aten._grouped_mm.default"})
ON_ROWS = frozenset(
    {
        "add.Tensor", "sub.Tensor", "mul.Tensor", "div.Tensor", "neg.default", "pow.Tensor_Scalar", "rsqrt.default",
        "clamp.default", "clamp_min.default", "clamp_max.default", "sigmoid.default", "silu.default", "gelu.default",
        "relu.default", "tanh.default", "square.default", "exp.default", "_to_copy.default", "softplus.default",
        "leaky_relu.default", "mish.default", "hardswish.default", "maximum.default", "minimum.default",
    }
)  # fmt: skip
"""Ops of aten on elements, between the products of experts."""


def order_by_token(captured: CapturedModel) -> CapturedModel:
    """Rows that are sorted by expert and put back are never sorted in the graph; what does not fit is left alone."""
    for sort in calls(captured.graph, aten.sort.default):
        region = _Region(captured, sort)
        if region.read():
            for node, value in region.ends:
                substitute(node, value)
    return captured


class _Unknown(Exception):
    """Something reads sorted rows that is no op on rows."""


@dataclass(slots=True)
class _Region:
    """What follows from a sort of experts' ids, as far as rows are back in the order of the tokens.

    values: of each node whose rows are sorted its counterpart `[*leading, k, ...]`. tokens: nodes that say which token
    a row is of. counted: nodes that say how many rows an expert has. inverse: nodes that undo the order.
    """

    captured: CapturedModel
    sort: fx.Node
    ids: Any = None
    leading: tuple[int, ...] = ()
    values: dict[fx.Node, Any] = field(default_factory=dict)
    tokens: set[fx.Node] = field(default_factory=set)
    counted: set[fx.Node] = field(default_factory=set)
    inverse: set[fx.Node] = field(default_factory=set)
    ends: list[tuple[fx.Node, fx.Node]] = field(default_factory=list)
    order: Any = None

    def read(self) -> bool:
        """Write the counterparts of all values; whether that can be done, and rows are put back somewhere."""
        flat: Any = self.sort.args[0]
        several = flat.target is aten.reshape.default and len(shape_of(flat.args[0])) == 2
        if flat.meta["val"].dtype.is_floating_point or len(shape_of(flat)) != 1 or not several:
            return False
        self.ids = flat.args[0]
        tokens, k = shape_of(self.ids)
        found = results(self.sort)
        self.order = found.get(1)
        ascending = len(self.sort.args) < 3 and not self.sort.kwargs.get("descending", False)
        if self.order is None or not ascending or set(self.sort.users) != set(found.values()):
            return False
        self.leading = self._tokens_of_batch(tokens, k)
        if self.leading != (tokens,):
            self.ids = insert(self.sort, aten.reshape.default, (self.ids, [*self.leading, k]))
        counts = found.get(0)
        if counts is not None:
            self.counted.add(counts)
        try:
            for node in _after(self.sort):
                if node.op == "call_function" and any(self._is_known(o) for o in operands(node)):
                    self._follow(node, k)
                elif node.op == "output" and any(self._is_known(o) for o in operands(node)):
                    return False
        except _Unknown:
            return False
        return bool(self.ends)

    def _tokens_of_batch(self, tokens: int, k: int) -> tuple[int, ...]:
        """Leading dims that were merged into tokens before they were taken: `[batch, sequence]`."""
        for user in self.order.users:
            if _is_token(user, self.order, k):
                for reader in user.users:
                    taken: Any = reader.args[0]
                    if reader.target is aten.index.Tensor and taken.target is aten.reshape.default:
                        leading = leading_dims(shape_of(taken.args[0]), shape_of(taken))
                        if leading is not None:
                            return leading
        return (tokens,)

    def _is_known(self, node: fx.Node) -> bool:
        kinds = (self.values, self.tokens, self.counted, self.inverse)
        return node is self.order or any(node in kind for kind in kinds)

    def _follow(self, node: fx.Node, k: int) -> None:
        """What becomes of a node that reads a known one."""
        if node.target is operator.getitem:
            if node.args[0] not in self.inverse:
                assert node.args[0] is self.sort
            elif node.args[1] == 1:
                self.inverse.add(node)
        elif _is_token(node, self.order, k):
            self.tokens.add(node)
        elif self._inverts(node):
            self.inverse.add(node)
        elif node.target is aten.index.Tensor:
            self._index(node, k)
        elif node.target is aten.embedding.default and len(node.args) == 2 and self._is_expert(node.args[1]):
            self.values[node] = insert(node, aten.embedding.default, (node.args[0], self.ids))
        elif target_name(node.target) in PRODUCTS:
            args: Any = node.args
            rows, weight, ends, *others = args
            plain = all(other is None for other in (*others, *node.kwargs.values())) and len(shape_of(weight)) == 3
            if not plain or rows not in self.values or not self._ends(ends, shape_of(weight)[0]):
                raise _Unknown
            self.values[node] = insert(node, grouped_linear, (self.values[rows], self.ids, weight))
        elif self._counts(node):
            self.counted.add(node)
        else:
            self.values[node] = self._on_rows(node)

    def _index(self, node: fx.Node, k: int) -> None:
        """Rows are taken in the order of the experts, or put back; or something of each row's expert is taken."""
        args: Any = node.args
        source, indices = args
        if not isinstance(indices, list | tuple) or len(indices) != 1:
            raise _Unknown
        [index] = indices
        rest = list(shape_of(source)[1:])
        if index in self.inverse and source in self.values:
            self._put_back(node, self.values[source], k)
        elif self._is_known(source):
            raise _Unknown
        elif index is self.order:
            self.values[node] = insert(node, aten.reshape.default, (source, [*self.leading, k, *rest]))
        elif index in self.tokens:
            self.values[node] = insert(node, aten.reshape.default, (source, [*self.leading, 1, *rest]))
        elif self._is_expert(index):
            self.values[node] = insert(node, aten.index.Tensor, (source, [self.ids]))
        else:
            raise _Unknown

    def _is_expert(self, node: Any) -> bool:
        """The sorted ids themselves."""
        return node in self.counted and node.target is operator.getitem

    def _put_back(self, node: fx.Node, value: fx.Node, k: int) -> None:
        """Rows in the order of the tokens; where those of a token are summed, they are where they still stand."""
        if shape_of(value)[len(self.leading)] != k:
            raise _Unknown  # rows of tokens, which have met no expert
        self.ends.append((node, insert(node, aten.reshape.default, (value, list(shape_of(node))))))
        rows, *rest = shape_of(node)
        for parted in node.users:
            if parted.target is not aten.reshape.default or shape_of(parted) != (rows // k, k, *rest):
                continue
            for total in parted.users:
                if total.target is aten.sum.dim_IntList and total.args[1:] == ([1],) and not total.kwargs:
                    summed = insert(total, aten.sum.dim_IntList, (value, [len(self.leading)]))
                    whole = insert(total, aten.reshape.default, (summed, list(shape_of(total))))
                    self.ends.append((total, whole))

    def _inverts(self, node: fx.Node) -> bool:
        """`argsort(order)`, a sort of it, or `empty[order] = arange`."""
        if node.target in (aten.argsort.default, aten.sort.default):
            return node.args[0] is self.order and len(node.args) < 3 and not node.kwargs
        args: Any = node.args
        if node.target is not aten.index_put.default or len(args) != 3 or list(args[1]) != [self.order]:
            return False
        written = args[2]
        constant = self.captured.constants.get(written.name)
        return constant is not None and torch.equal(constant, torch.arange(shape_of(node)[0]))

    def _counts(self, node: fx.Node) -> bool:
        """A step from sorted ids to where each expert's rows end."""
        return all(o in self.counted for o in operands(node)) and node.target in (
            aten._to_copy.default,
            aten.histc.default,
            aten.cumsum.default,
        )

    def _ends(self, node: Any, num_experts: int) -> bool:
        """Is this the running sum of a histogram of the sorted ids, one bin an expert?"""
        if node not in self.counted:
            return False
        total: Any = node
        while total.target is aten._to_copy.default:
            total = total.args[0]
        bins: Any = total.args[0]
        while bins.target is aten._to_copy.default:
            bins = bins.args[0]
        last = num_experts - 1
        return (
            total.target is aten.cumsum.default
            and bins.target is aten.histc.default
            and tuple(bins.args[1:]) == (num_experts, 0, last)
        )

    def _on_rows(self, node: fx.Node) -> fx.Node:
        """The same op on counterparts: dims after the first move back by as many as rows have become."""
        shift = len(self.leading)
        rows = [o for o in operands(node) if o in self.values]
        if not rows or any(self._is_known(o) and o not in self.values for o in operands(node)):
            raise _Unknown
        rank = len(shape_of(node))
        if target_name(node.target).removeprefix("aten.") in ON_ROWS:
            if any((len(shape_of(o)) == rank) is not (o in self.values) for o in operands(node)):
                raise _Unknown  # what is no row may only be broadcast to all rows
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.values.get(n, n))
            return insert(node, node.target, args, kwargs)
        given: Any = node.args
        source: Any = given[0]
        if node.target is aten.slice.Tensor:
            dim = int(given[1]) % rank if len(given) > 1 else 0
            if dim > 0:
                return insert(node, node.target, (self.values[source], dim + shift, *node.args[2:]))
        if node.target is aten.unsqueeze.default:
            dim = int(given[1]) % rank
            if dim > 0:
                return insert(node, node.target, (self.values[source], dim + shift))
        if node.target is aten.reshape.default and shape_of(node)[:1] == shape_of(source)[:1]:
            value = self.values[source]
            kept = shape_of(value)[: shift + 1]
            return insert(node, node.target, (value, [*kept, *shape_of(node)[1:]]))
        if node.target in (aten.mean.dim, aten.sum.dim_IntList, aten.softmax.int):
            inner = len(shape_of(source))
            several = isinstance(given[1], list | tuple)
            dims = [d % inner for d in (given[1] if several else [given[1]])]
            if dims and 0 not in dims:
                moved: Any = [d + shift for d in dims]
                moved = moved if several else moved[0]
                return insert(node, node.target, (self.values[source], moved, *node.args[2:]), node.kwargs)
        raise _Unknown


def _after(node: fx.Node) -> list[fx.Node]:
    """The nodes of a graph behind this one, in order."""
    out = []
    while (node := node.next).op != "root":
        out.append(node)
    return out


def _is_token(node: fx.Node, order: fx.Node, k: int) -> bool:
    """`order // k`: which token a row is of."""
    floored = node.target is aten.floor_divide.default or (
        node.target is aten.div.Tensor_mode and node.kwargs.get("rounding_mode") == "floor"
    )
    return bool(floored and node.args[0] is order and node.args[1] == k)
