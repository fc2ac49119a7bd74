"""What has to be decided? A captured model as tables of ops and tensors, unfolded, each op with its rule.

A *tensor* is named by the node that stands for it: a placeholder, a call with one result, or a `getitem` of a call
with several. `getitem` nodes are no ops of their own. Backward passes run only through ops that a differentiable path
joins to the loss.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor as TorchTensor
from torch import fx

from autopar.rules.elementwise import is_positive
from autopar.rules.registry import result_index, rule_of
from autopar.rules.rule import Choice, Rule, choices
from autopar.rules.spare import handed_on, spare
from autopar.values.blocks import block_of
from autopar.values.graph import CapturedModel, operands, requires_grad, target_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tensor:
    """One tensor. `kind`: `op`, or that of its placeholder; `producer`: position of its op, None for placeholders.

    stored_size: bytes of an element as it is stored, of a parameter under mixed precision more than as computed on.
    shares: of a parameter, for each reader, its part of the bytes of all that its block uses (of several the one that
    uses most), and of all there are; 1 of all others.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    element_size: int
    stored_size: int
    dtype: str
    requires_grad: bool
    producer: int | None = None
    index: int = 0
    shares: tuple[float, float] = (1.0, 1.0)

    @property
    def is_cast(self) -> bool:
        """Whether it is computed on, and its gradient made, in another dtype than it is stored and summed in."""
        return self.stored_size != self.element_size


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Op:
    """One call. `signature` is equal for calls that cost the same whatever is chosen; `results[i]` is None if unread.

    node: a call with its target, arguments and sizes, though perhaps others' names: of ops that are alike the first.
    parameters: the operands that are parameters. has_backward: a differentiable path joins it to the loss.
    handed: operands that backward hands the result's gradient; spare: tensors beside, by pass (`rules.spare`).
    """

    position: int
    name: str
    node: fx.Node
    rule: Rule
    choices: Mapping[str, Choice]
    operands: tuple[str, ...]
    results: tuple[str | None, ...]
    operand_grads: tuple[bool, ...]
    result_grads: tuple[bool, ...]
    operand_shapes: tuple[tuple[int, ...], ...]
    result_shapes: tuple[tuple[int, ...], ...]
    operand_sizes: tuple[int, ...]
    result_sizes: tuple[int, ...]
    dtype: str
    has_backward: bool
    parameters: frozenset[int]
    handed: frozenset[int]
    spare: tuple[float, float]
    module: str
    signature: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Program:
    """`readers[tensor]` are pairs (position of op, operand).

    ends: what backward begins at, the loss or what a stage sends on.
    mutated: what the graph returns beside the loss, whole on every rank: new values of buffers, the count of labels.
    copies: how many micro-batches run at once (`lower.interleaved`). copy_of: of what depends on the batch, by name.
    made: what strategy graphs of the program share, whatever the mesh (`search.graph`). form: what programs share that
    differ in sizes alone, and in none that makes ops differ which are alike here (`program_line`).
    """

    captured: CapturedModel
    ops: tuple[Op, ...]
    tensors: Mapping[str, Tensor]
    readers: Mapping[str, tuple[tuple[int, int], ...]]
    loss: str
    ends: tuple[str, ...]
    mutated: tuple[str, ...]
    copies: int = 1
    copy_of: Mapping[str, int] = field(default_factory=dict)
    form: dict[object, Any] = field(default_factory=dict)
    made: dict[object, Any] = field(default_factory=dict, init=False)

    @property
    def microbatches(self) -> int:
        """How often a step runs the graph."""
        return self.captured.microbatches

    @cached_property
    def updated(self) -> frozenset[str]:
        """Parameters that get a gradient, which an optimizer steps and keeps state of."""
        trained = (name for name, tensor in self.tensors.items() if tensor.kind == "parameter" and tensor.requires_grad)
        return frozenset(n for n in trained if any(self.ops[p].has_backward for p, _ in self.readers[n]))

    @cached_property
    def strided(self) -> dict[str, TorchTensor]:
        """Tensors that are not contiguous in the whole graph, without values."""
        values = [(op.results[0], op.node.meta["val"]) for op in self.ops]
        return {n: v for n, v in values if n and isinstance(v, TorchTensor) and not v.is_contiguous()}

    @cached_property
    def aliases(self) -> dict[str, tuple[int, int]]:
        """Views: tensor -> (position of the view op, the operand whose storage it shares)."""
        out = {}
        for op in self.ops:
            if op.rule.alias is not None:
                out.update({r: (op.position, op.rule.alias) for r in op.results if r is not None})
        return out


def make_program(captured: CapturedModel) -> Program:
    """The tables of a captured model."""
    kinds = {p.placeholder: "parameter" for p in captured.parameters}
    kinds |= {b.placeholder: "buffer" for b in captured.buffers}
    kinds |= {name: "constant" for name in captured.constants}
    kinds |= {i.placeholder: "input" for i in captured.inputs}
    stored = {p.placeholder: p.storage.itemsize for p in captured.parameters}
    tensors: dict[str, Tensor] = {}
    readers: dict[str, list[tuple[int, int]]] = {}
    ops: list[Op] = []
    maker = OpMaker(kinds, _reached(captured))
    for node in captured.graph.nodes:
        if node.op == "placeholder":
            tensors[node.name] = _tensor(node, kinds[node.name], None, stored_size=stored.get(node.name))
        elif node.op == "call_function" and node.target is not operator.getitem and node.users:  # else it is not run
            op = maker.op(node, len(ops))
            ops.append(op)
            for index, result in enumerate(op.results):
                if result is not None:
                    tensors[result] = _tensor(captured.nodes[result], "op", op.position, index)
            for slot, name in enumerate(op.operands):
                readers.setdefault(name, []).append((op.position, slot))
    return Program(
        captured=captured,
        ops=tuple(ops),
        tensors={**tensors, **_shared_out([t for t in tensors.values() if t.kind == "parameter"], ops, readers)},
        readers={name: tuple(readers.get(name, ())) for name in tensors},
        loss=captured.loss,
        ends=captured.ends,
        mutated=captured.results,
    )


def _shared_out(
    parameters: Sequence[Tensor], ops: Sequence[Op], readers: Mapping[str, Sequence[tuple[int, int]]]
) -> dict[str, Tensor]:
    """Parameters with their shares."""
    sizes = {p.name: p.element_size * math.prod(p.shape) for p in parameters if p.name in readers}
    blocks = {name: {block_of(ops[position].module) for position, _ in readers[name]} for name in sizes}
    of_block: dict[str, int] = {}
    for name, nbytes in sizes.items():
        for block in blocks[name]:
            of_block[block] = of_block.get(block, 0) + nbytes
    whole, found = sum(sizes.values()), {}
    for p in parameters:
        if nbytes := sizes.get(p.name, 0):
            most = max(of_block[block] for block in blocks[p.name])
            copies = len(readers[p.name])  # each reader may want another one, of the same bucket
            found[p.name] = replace(p, shares=(nbytes / most / copies, nbytes / whole / copies))
    return found


def _tensor(
    node: fx.Node, kind: str, producer: int | None, index: int = 0, *, stored_size: int | None = None
) -> Tensor:
    value = node.meta["val"]
    return Tensor(
        name=node.name,
        kind=kind,
        shape=tuple(value.shape),
        element_size=value.element_size(),
        stored_size=value.element_size() if stored_size is None else stored_size,
        dtype=str(value.dtype).removeprefix("torch."),
        requires_grad=requires_grad(node),
        producer=producer,
        index=index,
    )


STATED = tuple(
    f.name for f in fields(Rule) if f.name not in ("factors", "product", "localize", "messages", "spare")
)  # factors are seen by themselves; functions are made of an op's name, its arguments and what is stated
"""What a rule says of an op in values: ops that differ in it (a tensor's square, the product of two) are not alike."""


class OpMaker:
    """Ops of a graph. What a rule may look at is the same for many of them, block after block: looked at once."""

    def __init__(self, kinds: Mapping[str, str], reached: set[fx.Node]) -> None:
        self.kinds, self.reached = kinds, reached
        self._like: dict[object, Op] = {}
        self._signatures: dict[object, int] = {}
        self._alike: dict[int, tuple[dict[str, Choice], frozenset[int], tuple[float, float]]] = {}
        self._forms: dict[int, tuple[object, TorchTensor]] = {}

    def op(self, node: fx.Node, position: int) -> Op:
        """The call's, at a position."""
        sources = operands(node)
        value = node.meta["val"]
        values: tuple[TorchTensor, ...] = tuple(value) if isinstance(value, tuple | list) else (value,)
        results: list[str | None] = [None] * len(values)
        if isinstance(value, tuple | list):
            for user in node.users:
                results[result_index(user)] = user.name
        else:
            results[0] = node.name
        key = self._seen(node, sources, values, results)
        like = self._like.get(key)
        if like is None:
            parameters = frozenset(i for i, s in enumerate(sources) if self.kinds.get(s.name) == "parameter")
            unread = tuple(r is None for r in results)
            like = self._like[key] = self.first(node, parameters, unread, has_backward=node in self.reached)
        return replace(
            like,
            position=position,
            name=node.name,
            operands=tuple(s.name for s in sources),
            results=tuple(results),
            module=node.meta.get("module", ""),
        )

    def _seen(
        self,
        node: fx.Node,
        sources: Sequence[fx.Node],
        values: Sequence[TorchTensor],
        results: Sequence[str | None],
    ) -> object:
        """All that a rule, and an op's other fields but names, may be made of."""
        return (
            node.target,
            _literals(node.args),
            _literals({k: v for k, v in node.kwargs.items() if k != "site"}),
            tuple(self._form(s.meta["val"]) for s in sources),
            tuple(map(self._form, values)),
            tuple((requires_grad(s), self.kinds.get(s.name) == "parameter", is_positive(s)) for s in sources),
            tuple(sources.index(s) for s in sources),
            requires_grad(node),
            node in self.reached,
            tuple(r is None for r in results),
        )

    def _form(self, value: TorchTensor) -> object:
        """Sizes, strides and dtype; graphs use one value for many nodes."""
        if id(value) not in self._forms:
            self._forms[id(value)] = (tuple(value.shape), value.stride(), value.dtype), value
        return self._forms[id(value)][0]

    def first(self, node: fx.Node, parameters: frozenset[int], unread: tuple[bool, ...], *, has_backward: bool) -> Op:
        """One that is like all such calls: at no position, without names of what it reads and makes."""
        rule, value = rule_of(node), node.meta["val"]
        sources = operands(node)
        values: tuple[TorchTensor, ...] = tuple(value) if isinstance(value, tuple | list) else (value,)
        inputs = tuple(source.meta["val"] for source in sources)
        dtype = next((v.dtype for v in (*values, *inputs) if v.dtype.is_floating_point), torch.float32)
        grads = tuple(requires_grad(s) for s in sources)
        shapes = tuple(tuple(v.shape) for v in inputs)
        result_shapes = tuple(tuple(v.shape) for v in values)
        named = {c.name: c for c in choices(rule)}
        key = (
            tuple(named.values()),
            tuple(getattr(rule, name) for name in STATED),
            target_name(node.target),
            constant_arguments(node),
            shapes,
            tuple(v.dtype for v in inputs),
            result_shapes,
            tuple(v.dtype for v in values),
            grads,
            requires_grad(node),
            has_backward,
            unread,
            parameters,
            tuple((n, f.size, f.summed, f.even) for n, f in rule.factors.items()),
        )
        signature = self._signatures.setdefault(key, len(self._signatures))
        if signature not in self._alike:
            self._alike[signature] = named, handed_on(node, rule), spare(node, rule)
        named, handed, beside = self._alike[signature]
        return Op(
            position=0,
            name=node.name,
            node=node,
            rule=rule,
            choices=named,
            operands=(),
            results=(),
            operand_grads=grads,
            result_grads=(requires_grad(node),) * len(values),
            operand_shapes=shapes,
            result_shapes=result_shapes,
            operand_sizes=tuple(v.element_size() for v in inputs),
            result_sizes=tuple(v.element_size() for v in values),
            dtype=str(dtype).removeprefix("torch."),
            has_backward=has_backward,
            parameters=parameters,
            handed=handed,
            spare=beside,
            module="",
            signature=signature,
        )


def _literals(value: object) -> object:
    """An argument as something that can be compared, nodes left out; 1, 1.0 and True differ."""
    if isinstance(value, fx.Node):
        return fx.Node
    if isinstance(value, (tuple, list)):
        return tuple(map(_literals, value))
    if isinstance(value, Mapping):
        return tuple((key, _literals(one)) for key, one in value.items())
    if isinstance(value, slice):
        return slice, _literals(value.start), _literals(value.stop), _literals(value.step)
    return type(value), value


def constant_arguments(node: fx.Node) -> str:
    """Arguments with tensors left out; `site` is a label that tells calls apart, no matter of cost."""
    kwargs = {k: v for k, v in node.kwargs.items() if k != "site"}
    return str(fx.node.map_arg((node.args, kwargs), lambda n: n.meta["val"].dim()))


def _reached(captured: CapturedModel) -> set[fx.Node]:
    """Nodes that the backward pass from the loss (or from what a stage sends on) runs through."""
    reached = {captured.nodes[name] for name in captured.ends}
    for node in reversed(captured.graph.nodes):
        if node in reached and requires_grad(node):
            reached.update(s for s in operands(node) if requires_grad(s))
    return {node for node in reached if requires_grad(node)}
