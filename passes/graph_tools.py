"""What do passes share? Inserting calls whose meta is complete, removing dead ones, and checking the result."""

import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.errors import PassError
from autopar.ops.batch_norm import batch_norm
from autopar.ops.own_gradient import is_own as is_own_call
from autopar.values.graph import CapturedModel, is_random, operands
from autopar.values.inputs import mapped_tensors

aten = torch.ops.aten
ASSERTIONS = (aten._assert_async.msg, aten._functional_assert_async.msg)
"""Calls that say what they assert, of which `normalize.keep_checks` makes checks."""
_OVERLOAD = type(aten.add.Tensor)


def insert(
    anchor: fx.Node,
    target: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> fx.Node:
    """A call just before `anchor`, made by the same module as it, its value inferred on the meta device."""
    graph = anchor.graph
    with graph.inserting_before(anchor):
        node = graph.create_node("call_function", target, args, dict(kwargs or {}), name=name)
    node.meta["module"] = anchor.meta["module"]
    infer_meta(node)
    return node


def rewrite(node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Put another call of the same value in place of `node`; the value is not inferred anew."""
    with node.graph.inserting_before(node):
        call = node.graph.create_node("call_function", target, args, dict(kwargs))
    call.meta = {key: node.meta[key] for key in ("val", "requires_grad", "module")}
    substitute(node, call)


def substitute(node: fx.Node, replacement: fx.Node) -> None:
    """Every user of `node` reads `replacement` instead, and `node` is gone."""
    node.replace_all_uses_with(replacement)
    node.graph.erase_node(node)


def infer_meta(node: fx.Node) -> None:
    """Run the node on meta tensors for its `val`; it requires a gradient where an operand does and it is floating."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    if not operands(node) and any(a.name == "device" for a in node.target._schema.arguments):  # type: ignore[union-attr]
        kwargs = {**kwargs, "device": torch.device("meta")}
    with torch.no_grad():
        try:
            value = run_without_values(node.target, args, kwargs)
        except NotImplementedError:  # no meta kernel: of the sizes known from the trace
            value = _run_on_zeros(node.target, args, kwargs, node.meta.get("val"))
    node.meta["val"] = value
    node.meta["requires_grad"] = needs_grad(node, value)


def run_without_values(target: Any, args: Any, kwargs: Any, *, known: Any = None) -> Any:
    """A call on meta tensors. Attention lays its result as its query lies; its meta kernel says otherwise.

    known: results of the call, but for their strides. Attention, whose kernel takes long, is not run where they do.
    """
    try:
        value = known if _lies_as_query(target, args, known) else target(*args, **kwargs)
    except NotImplementedError:  # torch.export runs an op without a meta kernel on zeros, once
        if known is None:
            raise
        value = known
    return torch.empty_like(args[0]) if _lies_as_query(target, args, value) else value


def _run_on_zeros(target: Any, args: Any, kwargs: Any, known: Any) -> Any:
    """The result of a call without a meta kernel, run on the CPU; of the sizes of `known`, where that is a tensor."""

    def zeros(leaf: Any) -> Any:
        return torch.zeros(leaf.shape, dtype=leaf.dtype) if isinstance(leaf, Tensor) else leaf

    given = mapped_tensors(zeros, (args, kwargs))
    value = mapped_tensors(lambda made: torch.empty_like(made, device="meta"), target(*given[0], **given[1]))
    is_known = isinstance(known, Tensor) and isinstance(value, Tensor)
    return torch.empty_like(known, dtype=value.dtype) if is_known else value


def _lies_as_query(target: Any, args: Any, value: Any) -> bool:
    is_attention = "attention" in str(target) and not is_own_call(target)
    return is_attention and isinstance(value, Tensor) and value.shape == args[0].shape


def _reads_only_sizes(target: Any) -> bool:
    """Whether a call makes a tensor as large as its operand: `zeros_like`, `new_full`."""
    name = target._schema.name.partition("::")[2] if isinstance(target, torch._ops.OpOverload) else ""
    return name.endswith("_like") or name.startswith("new_")


def needs_grad(node: fx.Node, value: Any) -> bool:
    """Is a trainable parameter upstream of a call with this value, and the call one that autograd goes through?"""
    if node.target is aten.detach.default or _is_running_statistic(node) or _reads_only_sizes(node.target):
        return False
    tensors = value if isinstance(value, tuple | list) else (value,)
    floating = any(isinstance(t, Tensor) and (t.is_floating_point() or t.is_complex()) for t in tensors)
    return floating and any(bool(operand.meta["requires_grad"]) for operand in operands(node))


def _is_running_statistic(node: fx.Node) -> bool:
    if node.target is not operator.getitem:
        return False
    source, index = node.args[0], node.args[1]
    return isinstance(source, fx.Node) and source.target is batch_norm and bool(index)


def copied_name(name: str, copy: int) -> str:
    """What a value of the batch is called in a copy of a woven graph (`passes.weave_copies`)."""
    return f"{name}_{copy}th" if copy else name


def is_aten(target: Any) -> bool:
    """Is a call's target an operator of torch with a schema, not a Python function?"""
    return isinstance(target, _OVERLOAD)


def calls(graph: fx.Graph, *targets: Any) -> Iterator[fx.Node]:
    """The calls of any of `targets`, in order; safe against edits while iterating."""
    wanted = set(targets)
    return iter([node for node in graph.nodes if node.op == "call_function" and node.target in wanted])


def results(node: fx.Node) -> dict[int, fx.Node]:
    """The `getitem` users of a node with several results, by position."""
    return {int(user.args[1]): user for user in node.users if user.target is operator.getitem}  # type: ignore[arg-type]


def output_node(graph: fx.Graph) -> fx.Node:
    last: fx.Node = next(iter(reversed(graph.nodes)))
    return last


def outputs(graph: fx.Graph) -> tuple[fx.Node, ...]:
    """The loss (or what a call returns), the new value of each mutated buffer, perhaps the count of labels."""
    values: Any = output_node(graph).args[0]
    return tuple(values)


def remove_dead(graph: fx.Graph) -> None:
    """Drop calls that nothing reads: in a functional graph they have no effect, but for assertions, and for what others
    draw after them."""
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target not in ASSERTIONS and not is_random(node):
            graph.erase_node(node)


def tidy(captured: CapturedModel) -> CapturedModel:
    """Drop dead calls and constants, then name ends and mutated buffers as the graph's output has them now."""
    graph = captured.graph
    remove_dead(graph)
    constants = dict(captured.constants)
    for node in list(graph.nodes):
        if node.op == "placeholder" and node.name in constants and not node.users:
            del constants[node.name]
            graph.erase_node(node)
    values = tuple(node.meta["val"] for node in outputs(graph))
    found = [node.name for node in outputs(graph)]
    ends, names = tuple(found[: len(captured.ends)]), iter(found[len(captured.ends) :])
    output_node(graph).meta = {"val": values, "requires_grad": True, "module": ""}
    buffers = tuple(replace(b, mutated_by=next(names)) if b.mutated_by else b for b in captured.buffers)
    parameters = tuple(replace(p, mutated_by=next(names)) if p.mutated_by else p for p in captured.parameters)
    accumulation = captured.accumulation
    if accumulation is not None and accumulation.count is not None:
        accumulation = replace(accumulation, count=next(names))
    return replace(
        captured,
        constants=constants,
        parameters=parameters,
        buffers=buffers,
        loss=ends[0] if captured.loss else "",
        outputs=ends if captured.outputs else (),
        accumulation=accumulation,
    )


def verify(captured: CapturedModel) -> None:
    """What every pass must leave behind.

    Raises:
        PassError: if the graph is not well formed, a node's meta is incomplete, or placeholders, loss or mutated
            buffers are not those that the specs name.
    """
    graph = captured.graph
    graph.lint()
    for node in graph.nodes:
        missing = [key for key in ("val", "requires_grad", "module") if key not in node.meta]
        if missing:
            raise PassError(f"{node.name} = {node.target}: meta lacks {missing}")
        for value in node.meta["val"] if isinstance(node.meta["val"], tuple | list) else (node.meta["val"],):
            if not isinstance(value, Tensor) or not value.is_meta:
                raise PassError(f"{node.name} = {node.target}: val is {type(value).__name__}, not a meta tensor")
    placeholders = [node.name for node in graph.nodes if node.op == "placeholder"]
    expected = [
        *(p.placeholder for p in captured.parameters),
        *(b.placeholder for b in captured.buffers),
        *captured.constants,
        *(i.placeholder for i in captured.inputs),
    ]
    if placeholders != expected:
        raise PassError(f"placeholders {placeholders} are not the specs' {expected}")
    found = [node.name for node in outputs(graph)]
    named = [*captured.ends, *captured.results]
    if found != named:
        raise PassError(f"outputs {found} are not the loss (or what is sent on), mutated buffers and count {named}")
