"""How does an exported program become a CapturedModel? Placeholders are sorted and named, meta is completed."""

import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind

from autopar.capture.fake_twin import has_value
from autopar.capture.fixed_sizes import fix_sizes
from autopar.capture.opaque import OPAQUE, Opaques
from autopar.capture.user_frame import frame_of_stack
from autopar.capture.written import Written
from autopar.errors import CaptureError
from autopar.ops.own_gradient import renewed
from autopar.passes.graph_tools import needs_grad, tidy
from autopar.passes.normalize.storage import offset_from_operand
from autopar.values.graph import BufferSpec, CapturedModel, InputSpec, ParameterSpec

PREFIX = "model."
_READS_NO_VALUE = (torch.ops.aten.detach.default, torch.ops.aten.clone.default)


def stop_gradients(program: ExportedProgram) -> None:
    """Write `torch.no_grad()` blocks as `detach` of what they read: inlining a block would forget that it has no
    gradients, and what it writes in place is not among its results."""
    _stop_gradients(program.graph_module, enabled=True)


def _stop_gradients(module: fx.GraphModule, *, enabled: bool) -> None:
    graph = module.graph
    for node in list(graph.nodes):
        is_block = node.target is torch.ops.higher_order.wrap_with_set_grad_enabled
        if is_block:
            _stop_gradients(module.get_submodule(str(node.args[1].target)), enabled=bool(node.args[0]))  # type: ignore[arg-type]
        if enabled or not (node.op == "placeholder" or (is_block and node.args[0])):
            continue
        for made in [node] if node.op == "placeholder" else list(node.users):
            if not _is_differentiable(made.meta.get("val")):
                continue
            with graph.inserting_after(made):
                stopped = graph.call_function(torch.ops.aten.detach.default, (made,))
            stopped.meta = dict(made.meta)
            made.replace_all_uses_with(stopped, delete_user_cb=lambda user, keep=stopped: _stops(user, keep))
    module.recompile()


def _is_differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _stops(user: fx.Node, stopped: fx.Node) -> bool:
    """Whether a reader inside a block without gradients reads what is stopped: all but blocks that have gradients."""
    if user is stopped or user.op == "output":
        return False
    return not (user.target is torch.ops.higher_order.wrap_with_set_grad_enabled and bool(user.args[0]))


def written_parameters(program: ExportedProgram) -> set[str]:
    """Names of the parameters that the program itself writes, which a trace with shadows does not."""
    return {
        str(spec.target).removeprefix(PREFIX)
        for spec in program.graph_signature.output_specs
        if spec.kind is OutputKind.PARAMETER_MUTATION
    }


def import_program(
    program: ExportedProgram,
    *,
    name: str,
    model: nn.Module,
    inputs: Sequence[tuple[str, Tensor]],
    opaques: Opaques,
    written: Written,
    has_loss: bool,
) -> CapturedModel:
    """The program's graph with placeholders in the order parameters, buffers, constants, inputs.

    Args:
        program: a functional export of a `LossModule` around `model`.
        model: the user's module, from which names, ties and trainability are read.
        inputs: path and tensor of each tensor input, in the program's order.
        opaques: what its opaque calls stand for.
        written: the parameters that forward writes, whose new values come last in its output.
        has_loss: it returns a loss, else what the model returns.

    Raises:
        CaptureError: if a value's shape depends on data, or the program calls a control-flow operator.
    """
    fix_sizes(program.graph)
    importer = _Importer(program, model, opaques)
    importer.placeholders(inputs, inputs_need=not has_loss)
    for node in program.graph.nodes:
        if node.op not in ("placeholder", "output"):
            importer.call(node)
    return importer.finish(name, written, has_loss=has_loss)


class _Importer:
    def __init__(self, program: ExportedProgram, model: nn.Module, opaques: Opaques) -> None:
        self.program = program
        self.model = model
        self.graph = fx.Graph()
        self.env: dict[str, fx.Node] = {}
        self.taken: set[str] = set()
        self.opaques = opaques
        self.observers: list[fx.Node] = []
        self.constants: dict[str, Tensor] = {}
        self.parameter_specs: list[ParameterSpec] = []
        self.buffer_specs: list[BufferSpec] = []
        self.input_specs: list[InputSpec] = []

    def placeholders(self, inputs: Sequence[tuple[str, Tensor]], *, inputs_need: bool) -> None:
        specs = self.program.graph_signature.input_specs
        by_target = {spec.target.removeprefix(PREFIX): spec.arg.name for spec in specs if spec.target is not None}
        for names, parameter in by_identity(self.model.named_parameters(remove_duplicate=False)):
            node = self._state("p_", names, parameter, by_target)
            node.meta["requires_grad"] = parameter.requires_grad
            spec = ParameterSpec(
                placeholder=node.name,
                names=names,
                shape=tuple(parameter.shape),
                dtype=parameter.dtype,
                trainable=parameter.requires_grad,
            )
            self.parameter_specs.append(spec)
        persistent = set(self.model.state_dict(keep_vars=True))
        for names, buffer in by_identity(self.model.named_buffers(remove_duplicate=False)):
            node = self._state("b_", names, buffer, by_target)
            self.buffer_specs.append(
                BufferSpec(
                    placeholder=node.name,
                    names=names,
                    shape=tuple(buffer.shape),
                    dtype=buffer.dtype,
                    persistent=any(name in persistent for name in names),
                )
            )
        unread = {node.name for node in self.program.graph.find_nodes(op="placeholder") if not node.users}
        for spec in specs:
            if spec.kind is InputKind.CONSTANT_TENSOR:
                if spec.arg.name in unread:
                    continue
                value = self.program.constants[str(spec.target)]
                node = self._placeholder("c_" + str(spec.target).removeprefix(PREFIX), value)
                self.constants[node.name] = _plain_constant(value, str(spec.target))
                self._check_no_state(value)
                self.env[spec.arg.name] = node
            elif spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER, InputKind.USER_INPUT):
                raise CaptureError(
                    f"the model uses {spec.target}, a {spec.kind.name.lower()}: only tensors are captured"
                )
        user = [spec.arg.name for spec in specs if spec.kind is InputKind.USER_INPUT]
        for old, (path, tensor) in zip(user, inputs, strict=True):
            node = self._placeholder(f"arg_{path}" if path[0].isdigit() else path, tensor)
            node.meta["requires_grad"] = tensor.requires_grad and inputs_need
            self.env[old] = node
            self.input_specs.append(
                InputSpec(placeholder=node.name, path=path, shape=tuple(tensor.shape), dtype=tensor.dtype)
            )

    def call(self, old: fx.Node) -> None:
        if old.op == "get_attr" or getattr(old.target, "namespace", "") == "higher_order":
            where = frame_of_stack(str(old.meta.get("stack_trace", ""))) or "the model"
            raise CaptureError(
                f"{where}: the graph holds {old.target}, a control-flow operator; write it without torch.cond "
                "or while_loop"
            )
        if old.target is OPAQUE:
            self._opaque(old)
            return
        if old.name in self.env:  # the one result of an opaque call
            return
        node = self.graph.node_copy(old, lambda n: self.env[n.name])
        if "as_strided" in str(old.target):
            offset_from_operand(node, old.args[0].meta["val"].storage_offset())  # type: ignore[union-attr]
        node.meta = {"val": _meta(old.meta.get("val"), old), "module": _module(old)}
        node.meta["requires_grad"] = needs_grad(node, node.meta["val"])
        self.env[old.name] = node

    def _opaque(self, old: fx.Node) -> None:
        """A call of the user's own in place of what stood for it; results without gradient are detached."""
        given_args: Any = old.args
        tensors, number = given_args
        own = self.opaques.calls[int(number)]
        values = _meta(old.meta["val"], old)
        target, constants = own.target()
        given = [self.env[n.name] for n in tensors]
        given += [self._constant(f"c_{old.name}", value) for value in constants]
        node = self.graph.call_function(target, tuple(given))
        node.meta = {"val": values if len(values) > 1 else values[0], "module": _module(old)}
        node.meta["requires_grad"] = needs_grad(node, node.meta["val"])
        if own.observes:
            self.observers.append(node)
        for user in old.users:
            index = int(user.args[1])  # type: ignore[arg-type]
            made = node
            if len(values) > 1:
                made = self.graph.call_function(operator.getitem, (node, index))
                needs = node.meta["requires_grad"] and values[index].is_floating_point()
                made.meta = {**node.meta, "val": values[index], "requires_grad": needs}
            if index in own.constant:
                with self.graph.inserting_after(made):
                    stopped = self.graph.call_function(torch.ops.aten.detach.default, (made,))
                stopped.meta = {**made.meta, "requires_grad": False}
                made = stopped
            self.env[user.name] = made

    def _constant(self, name: str, value: Tensor) -> fx.Node:
        """The placeholder of a tensor: of a parameter or buffer of the model, or a new constant."""
        state = (*self.model.named_parameters(), *self.model.named_buffers())
        owner = next((own for own, tensor in state if tensor is value), None)
        specs: list[ParameterSpec | BufferSpec] = [*self.parameter_specs, *self.buffer_specs]
        for spec in specs:
            if owner in spec.names:
                return self._named(spec.placeholder)
        inputs = {spec.placeholder for spec in self.input_specs}
        anchor = next(n for n in self.graph.nodes if n.op != "placeholder" or n.name in inputs)
        with self.graph.inserting_before(anchor):
            node = self._placeholder(name, value)
        self.constants[node.name] = _plain_constant(value, name)
        return node

    def _named(self, name: str) -> fx.Node:
        found: fx.Node = next(node for node in self.graph.nodes if node.name == name)
        return found

    def _observe(self) -> None:
        """Let the readers of a value whose gradient is hooked read the hook's node, the first hook nearest to them."""
        last = [node for node in self.graph.nodes if node.op == "placeholder"][-1]
        for node in reversed(self.observers):
            source: Any = node.args[0]
            (last if source.op == "placeholder" else source).append(node)
            for user in list(source.users):
                if user is not node:
                    user.replace_input_with(source, node)

    def _check_order(self, parameter: ParameterSpec, written: Written) -> None:
        """Raises CaptureError if a parameter is read before it is written through `.data`: eager's backward of what
        read it sees the new value, as no graph does."""
        where = next((written.by_data[name] for name in parameter.names if name in written.by_data), None)
        users = self._named(parameter.placeholder).users
        if where and parameter.trainable and any(user.target not in (renewed, *_READS_NO_VALUE) for user in users):
            raise CaptureError(
                f"{where}: forward reads the parameter {parameter.names[0]} before it writes it through .data, so that "
                "backward sees another value than forward did; write it first, or after the optimizer's step"
            )

    def finish(self, name: str, written: Written, *, has_loss: bool) -> CapturedModel:
        mutated: dict[str, fx.Node] = {}
        results: list[fx.Node] = []
        self._observe()
        for spec in self.program.graph_signature.output_specs:
            if spec.kind is OutputKind.USER_OUTPUT:
                results.append(self.env[spec.arg.name])
            elif spec.kind is OutputKind.BUFFER_MUTATION:
                mutated[str(spec.target).removeprefix(PREFIX)] = self.env[spec.arg.name]
        ends = results[: len(results) - len(written.values)]
        new_values = dict(zip(written.values, results[len(ends) :], strict=True))
        outputs = list(ends)
        for index, buffer in enumerate(self.buffer_specs):
            value = next((mutated[n] for n in buffer.names if n in mutated), None)
            if value is not None:
                outputs.append(value)
                self.buffer_specs[index] = replace(buffer, mutated_by=value.name)
        for index, parameter in enumerate(self.parameter_specs):
            value = next((new_values[n] for n in parameter.names if n in new_values), None)
            if value is not None:
                self._check_order(parameter, written)
                outputs.append(value)
                self.parameter_specs[index] = replace(parameter, mutated_by=value.name)
        self.graph.output(tuple(outputs))
        return tidy(
            CapturedModel(
                name=name,
                graph=self.graph,
                parameters=tuple(self.parameter_specs),
                buffers=tuple(self.buffer_specs),
                inputs=tuple(self.input_specs),
                loss=ends[0].name if has_loss else "",
                outputs=() if has_loss else tuple(end.name for end in ends),
                constants=self.constants,
                training=self.model.training,
            )
        )

    def _check_no_state(self, constant: Tensor) -> None:
        """Raises CaptureError if forward reaches a parameter or buffer otherwise than from the model's attributes."""
        storage = constant.untyped_storage().data_ptr()
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        for name, tensor in named:
            if storage and tensor.device == constant.device and tensor.untyped_storage().data_ptr() == storage:
                raise CaptureError(
                    f"forward reads {name} (or a view of it) through a closure or a global, or a view kept as an "
                    "attribute, where a graph has a constant; read it as an attribute of its module in forward"
                )

    def _state(self, prefix: str, names: tuple[str, ...], tensor: Tensor, by_target: Mapping[str, str]) -> fx.Node:
        node = self._placeholder(prefix + names[0], tensor)
        for name in names:
            if name in by_target:
                self.env[by_target[name]] = node
        return node

    def _placeholder(self, wish: str, tensor: Tensor) -> fx.Node:
        return placeholder(self.graph, self.taken, wish, tensor)


def placeholder(graph: fx.Graph, taken: set[str], wish: str, tensor: Tensor) -> fx.Node:
    """A new placeholder like `tensor`, named as nearly like `wish` as the names taken allow."""
    base = re.sub(r"\W", "_", wish).lower()
    name, number = base, 1
    while name in taken:
        name, number = f"{base}_{number}", number + 1
    taken.add(name)
    node = graph.create_node("placeholder", name, name=name)
    if node.name != name:  # a Python keyword or builtin: fx chose another name, the argument follows it
        node.target = node.name
        taken.add(node.name)
    node.meta = {"val": torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), "module": ""}
    node.meta["requires_grad"] = False
    return node


def by_identity(named: Iterable[tuple[str, Tensor]]) -> list[tuple[tuple[str, ...], Tensor]]:
    """Each tensor once, with all its names."""
    groups: dict[int, tuple[list[str], Tensor]] = {}
    for name, tensor in named:
        groups.setdefault(id(tensor), ([], tensor))[0].append(name)
    return [(tuple(names), tensor) for names, tensor in groups.values()]


def _plain_constant(value: Any, target: str) -> Tensor:
    if not isinstance(value, Tensor) or not has_value(value):
        raise CaptureError(
            f"the tensor attribute {target.removeprefix(PREFIX)!r} has no value on the meta device; "
            "register it as a buffer, or build it on the CPU"
        )
    return value.detach().cpu()


def _meta(value: Any, node: fx.Node) -> Any:
    """A fake value as a plain meta tensor."""
    if isinstance(value, tuple | list):
        if any(isinstance(item, tuple | list) for item in value):
            where = frame_of_stack(str(node.meta.get("stack_trace", ""))) or "the model"
            raise CaptureError(f"{where}: {node.target} returns lists in a tuple; a captured call returns tensors")
        return tuple(_meta(item, node) for item in value)
    if isinstance(value, Tensor) and all(isinstance(n, int) for n in value.shape):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
    if value is None:
        return torch.empty(0, device="meta")
    where = frame_of_stack(str(node.meta.get("stack_trace", ""))) or "the model"
    raise CaptureError(
        f"{where}: the shape of {node.target} depends on the data ({value}); a captured model has fixed shapes: "
        "use a mask or torch.where instead of selecting by condition or calling .item()"
    )


def _module(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    return "" if path == PREFIX.rstrip(".") else path.removeprefix(PREFIX).split("@")[0]


def without_gradients(captured: CapturedModel) -> CapturedModel:
    """The graph where autograd records nothing."""
    for node in captured.graph.nodes:
        if node.op != "output":
            node.meta["requires_grad"] = False
    return replace(captured, parameters=tuple(replace(p, trainable=False) for p in captured.parameters))
