"""What is `torch.autograd.grad` in forward? Ops of the trace, which the step differentiates once more.

The trace so far says how outputs follow from inputs. That part is run and differentiated on fake tensors of its own,
and the ops that autograd calls there are called in the trace. (Private torch API, kept in this file: the tracer behind
torch.export.)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot, make_fx, track_tensor_tree
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.capture.fake_twin import fake_like
from autopar.capture.opaque import OPAQUE
from autopar.capture.real_values import real_run
from autopar.capture.user_frame import own_frame
from autopar.errors import CaptureError
from autopar.values.inputs import leaves_of, mapped_tensors

_DETACH = torch.ops.aten.detach.default
_OWN = "detached by the user"


def is_tracing() -> bool:
    """Whether ops are noted now; a run on fake tensors alone is differentiated as any other."""
    return get_proxy_mode() is not None


def inner_gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[Tensor | None, ...]:
    """`torch.autograd.grad` in a trace.

    Raises:
        CaptureError: if the trace does not say how the outputs follow from the inputs, or that is not repeatable.
    """
    ends, begins = _tensors(outputs), _tensors(inputs)
    arriving = [None] * len(ends) if grad_outputs is None else list(_listed(grad_outputs))
    arriving = [torch.ones_like(end) if g is None else g for end, g in zip(ends, arriving, strict=True)]
    if is_grads_batched:
        raise CaptureError(f"{own_frame()}: torch.autograd.grad with is_grads_batched in forward is not captured")
    part = _Part(begins, ends)
    formula, used = part.differentiated()
    given = (*begins, *part.boundary_tensors(), *(arriving[number] for number in part.reached))
    with torch.set_grad_enabled(create_graph):
        made = iter(fx.Interpreter(formula).run(*given))
    found = [next(made) if is_used else None for is_used in used]
    if materialize_grads:
        return tuple(torch.zeros_like(b) if g is None else g for b, g in zip(begins, found, strict=True))
    if not allow_unused and not all(used):
        raise CaptureError(f"{own_frame()}: torch.autograd.grad: an output does not depend on an input")
    return tuple(found)


def _listed(value: Any) -> Sequence[Any]:
    return [value] if isinstance(value, Tensor) else list(value)


def _tensors(value: Any) -> list[Tensor]:
    listed = _listed(value)
    if not all(isinstance(part, Tensor) for part in listed):
        raise CaptureError(f"{own_frame()}: torch.autograd.grad in forward is captured of tensors only")
    return list(listed)


class _Part:
    """The ops of a trace between tensors."""

    def __init__(self, begins: Sequence[Tensor], ends: Sequence[Tensor]) -> None:
        mode: Any = get_proxy_mode()
        self.tracer = mode.tracer
        self.begins, self.ends = [self._node(t) for t in begins], [self._node(t) for t in ends]
        self.like = list(begins)
        dependent = set(self.begins)
        for node in self.tracer.graph.nodes:
            if any(source in dependent for source in node.all_input_nodes):
                dependent.add(node)
        kept = set[fx.Node]()
        waiting = [*self.ends, *(n for n in dependent if _is_mutable(n))]
        while waiting:
            node = waiting.pop()
            if node in dependent and node not in kept and node not in self.begins:
                kept.add(node)
                waiting += node.all_input_nodes
        self.nodes = [n for n in self.tracer.graph.nodes if n in kept or n.target is torch._C._set_grad_enabled]
        for node in kept:
            self._check(node, kept)
        sources = [source for node in self.nodes for source in node.all_input_nodes]
        self.boundary = [n for n in dict.fromkeys(sources) if n not in kept and n not in self.begins]
        self.reached = [i for i, end in enumerate(self.ends) if end in kept or end in self.begins]
        for node in self.boundary:
            self._check_unchanged(node, kept)

    def _node(self, tensor: Tensor) -> fx.Node:
        slot: Any = get_proxy_slot(tensor, self.tracer, None)
        if slot is None:
            raise CaptureError(f"{own_frame()}: torch.autograd.grad of a tensor that forward did not compute")
        return slot.proxy.node  # type: ignore[no-any-return]

    def _check(self, node: fx.Node, kept: set[fx.Node]) -> None:
        tags = getattr(node.target, "tags", ())
        why = ""
        if node.target is OPAQUE:
            why = "an autograd.Function or a hook on a gradient"
        elif torch.Tag.nondeterministic_seeded in tags and _draws(node):
            why = f"random numbers ({node.target})"
        elif _is_mutable(node) and node.args[0] not in kept:
            why = f"an in-place op ({node.target}) on what it is not computed from"
        if why:
            raise _refusal(why)

    def _check_unchanged(self, node: fx.Node, kept: set[fx.Node]) -> None:
        """The values that are taken from outside are those of now, which must be those of then."""
        if any(_is_mutable(user) and user.args[0] is node for user in node.users):
            raise _refusal("a tensor that is written in place")

    def boundary_tensors(self) -> list[Tensor]:
        """Traced tensors that stand for the values of the boundary: running statistics among them by copies, which
        are updated once more."""
        alive = {slot.proxy.node: tensor for tensor, slot in self.tracer.tensor_tracker.items()}
        found = [alive[node] if node in alive else self._tracked(node) for node in self.boundary]
        return [t.clone() if _is_statistic(n) else t for n, t in zip(self.boundary, found, strict=True)]

    def _tracked(self, node: fx.Node) -> Tensor:
        made: Tensor = torch.empty_like(node.meta["val"])
        track_tensor_tree(made, fx.Proxy(node, self.tracer), constant=None, tracer=self.tracer)
        return made

    def differentiated(self) -> tuple[fx.GraphModule, list[bool]]:
        """The gradients of the inputs by inputs, boundary and arriving gradients, and which inputs have one."""
        graph, twins = fx.Graph(), dict[fx.Node, fx.Node]()
        for number, node in enumerate((*self.begins, *self.boundary)):
            twins[node] = graph.placeholder(f"given_{number}")
        for node in self.nodes:
            twins[node] = graph.node_copy(node, lambda n: twins[n])
        graph.output(tuple(twins[self.ends[number]] for number in self.reached))
        if not self.reached:
            return fx.GraphModule(self.tracer.root, graph), [False for _ in self.begins]
        count, used = len(self.begins), list[bool]()
        fixed = {count + number for number, node in enumerate(self.boundary) if _is_statistic(node)}

        def run(*given: Tensor) -> list[Tensor]:
            leaves = [t.detach().requires_grad_(t.is_floating_point() and i not in fixed) for i, t in enumerate(given)]
            with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
                ends = _Noting(fx.GraphModule(self.tracer.root, graph)).run(*leaves[: count + len(self.boundary)])
            pairs = [(end, g) for end, g in zip(ends, given[-len(ends) :], strict=True) if end.requires_grad]
            if not pairs:
                used[:] = [False for _ in range(count)]
                return []
            found = torch.autograd.grad(
                [end for end, _ in pairs], leaves[:count], [g for _, g in pairs], create_graph=True, allow_unused=True
            )
            used[:] = [gradient is not None for gradient in found]
            return [gradient for gradient in found if gradient is not None]

        values = [node.meta["val"] for node in (*self.boundary, *(self.ends[number] for number in self.reached))]
        with real_run():
            formula: fx.GraphModule = make_fx(run)(*fake_like([*self.like, *values]))
        for node in list(formula.graph.nodes):
            if node.target is _DETACH and _OWN not in node.meta:
                node.replace_all_uses_with(node.args[0])  # autograd's own, of what it saves: that has gradients too
                formula.graph.erase_node(node)
            elif isinstance(node.meta.get("val"), tuple) and None in node.meta["val"]:
                _ask_for_all(node)
        formula.graph.eliminate_dead_code()
        formula.recompile()
        return formula, used


def _ask_for_all(node: fx.Node) -> None:
    """Let a call make the gradients too that nobody reads: a call of a graph has no results that are missing."""
    masks = [i for i, a in enumerate(node.args) if isinstance(a, list) and a and all(isinstance(b, bool) for b in a)]
    names = [argument.name for argument in getattr(node.target, "_schema").arguments]  # noqa: B009
    given = dict(zip(names, node.args, strict=False))
    if not masks or names[masks[-1]] != "output_mask" or ("weight" in given and given["weight"] is None):
        raise _refusal(f"{node.target}")
    node.update_arg(masks[-1], [True] * len(node.meta["val"]))


def _refusal(why: str) -> CaptureError:
    return CaptureError(
        f"{own_frame()}: forward differentiates inside itself (torch.autograd.grad) through {why}, which is not "
        "captured; give the loss that needs it to a step outside"
    )


def _draws(node: fx.Node) -> bool:
    """Whether an op that may draw numbers does."""
    aten = torch.ops.aten
    if node.target in (aten.dropout.default, aten.alpha_dropout.default, aten.feature_dropout.default):
        return bool(node.args[1] and node.args[2])
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(node.args[4] if len(node.args) > 4 else node.kwargs.get("dropout_p", 0.0))
    is_recurrent = node.target in (aten.gru.input, aten.lstm.input, aten.rnn_tanh.input, aten.rnn_relu.input)
    return not (is_recurrent and not node.args[5])


def _is_statistic(node: fx.Node) -> bool:
    """Whether a normalization layer may write a value, which no schema tells."""
    return any("norm" in str(user.target) and node in user.args[3:] for user in node.users)


def _is_mutable(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


class _Noting(fx.Interpreter):
    """Notes where gradients stop: by `detach`, and under `no_grad`, which the formula would forget."""

    def run_node(self, node: fx.Node) -> Any:
        made = super().run_node(node)
        if node.op != "call_function":
            return made
        if not torch.is_grad_enabled():
            made = mapped_tensors(Tensor.detach, made)
        elif node.target is not _DETACH:
            return made
        mode: Any = get_proxy_mode()
        for leaf in leaves_of(made):
            if isinstance(leaf, Tensor):
                slot: Any = get_proxy_slot(leaf, mode.tracer)
                slot.proxy.node.meta[_OWN] = True
        return made
