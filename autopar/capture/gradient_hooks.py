"""How is a hook on a gradient kept? What it makes of the gradient is traced, and becomes the backward of one node.

Hooks of forward run when forward is traced. One that only looks at gradients, that decides by their values or that
reads what forward made is refused by its own file and line. Private torch API, kept in this file:
`torch.utils.hooks.BackwardHook`, with which modules set up full backward hooks, and their tables of hooks.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as torch_module
from torch.utils.hooks import BackwardHook

from autopar.capture.fake_twin import fake_like, is_fake
from autopar.capture.opaque import Opaque, active_opaques
from autopar.capture.user_frame import innermost, own_frame
from autopar.errors import CaptureError
from autopar.ops.own_gradient import ArgumentSlot, Hooked
from autopar.passes.graph_tools import tidy
from autopar.values.graph import CapturedModel

Hook = Callable[..., Any]


def check_hooks(model: nn.Module) -> None:
    """Raises CaptureError for hooks that are not kept: those that see no gradient that a graph has."""
    for module in model.modules():
        if module._backward_hooks and not module._is_full_backward_hook:
            _refuse(next(iter(module._backward_hooks.values())), "is a backward hook of the old kind, which sees "
                    "gradients of one op only; use register_full_backward_hook")  # fmt: skip
    if torch_module._global_backward_hooks and not torch_module._global_is_full_backward_hook:
        _refuse(next(iter(torch_module._global_backward_hooks.values())), "is a backward hook of the old kind; use "
                "register_module_full_backward_hook")  # fmt: skip
    for name, parameter in model.named_parameters():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if after:
            _refuse(next(iter(after.values())), f"is a post-accumulate-grad hook of {name}, which plans could only run "
                    "on parts of gradients; remove it, and change gradients after backward")  # fmt: skip


def _refuse(hook: Any, why: str) -> NoReturn:
    raise CaptureError(f"{_where(hook)} {why}")


def _where(hook: Any) -> str:
    """`file:line: the hook NAME`."""
    function = getattr(hook, "__func__", hook)
    function = getattr(function, "func", function)
    code = getattr(function, "__code__", None) or getattr(type(hook).__call__, "__code__", None)
    name = getattr(function, "__qualname__", type(hook).__qualname__)
    return f"{code.co_filename}:{code.co_firstlineno}: the hook {name}" if code else f"the hook {name}"


def is_torchs(code: Any) -> bool:
    """Whether a function is torch's own."""
    return code is not None and innermost([(code.co_filename, code.co_firstlineno)]) is None


class Handle:
    """What registering a hook in forward returns."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook

    def remove(self) -> None:
        _refuse(self._hook, "is removed in forward; register it only where it is wanted")


def hook_in_forward(tensor: Tensor, hook: Hook, *, is_parameter: bool) -> Any:
    """`tensor.register_hook(hook)`."""
    if is_parameter:
        _refuse(hook, "is registered on a parameter in forward, one more at each call; register it once, outside")
    if is_torchs(getattr(hook, "__code__", None)):
        raise CaptureError(f"{own_frame()}: a hook on several gradients only looks at them; remove it")
    tracing = active_opaques()
    if not tensor.requires_grad or tracing is None or not is_fake(tensor):
        return tensor.register_hook(hook)  # type: ignore[no-untyped-call]
    shapes = [_like(tensor)]
    own = Opaque(
        run=lambda value: (value,),
        target=lambda: hooked(hook, shapes),
        key=("hook", hook, shapes[0].shape),
        observes=True,
    )
    tracing.call((tensor,), own)
    return Handle(hook)


@contextmanager
def module_hooks() -> Iterator[None]:
    """Inside, full backward hooks of modules become calls."""
    before = BackwardHook.setup_input_hook, BackwardHook.setup_output_hook
    BackwardHook.setup_input_hook, BackwardHook.setup_output_hook = _at_inputs, _at_outputs  # type: ignore[method-assign]
    try:
        yield
    finally:
        BackwardHook.setup_input_hook, BackwardHook.setup_output_hook = before  # type: ignore[method-assign]


def _at_inputs(own: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    own.seen = [_like(arg) if isinstance(arg, Tensor) and arg.requires_grad else None for arg in args]
    own.given = []
    if not own.user_hooks or not any(shape is not None for shape in own.seen) or not torch.is_grad_enabled():
        return args

    def run(*gradients: Any) -> Any:
        held: Any = gradients
        for hook in own.user_hooks:
            made = hook(own.module, held, tuple(own.given))
            held = held if made is None else made
        return held

    return _through(own.user_hooks, run, args, own.seen, own.given)


def _at_outputs(own: Any, result: Any) -> Any:
    outputs = result if isinstance(result, tuple) else (result,)
    shapes = [_like(part) if isinstance(part, Tensor) and part.requires_grad else None for part in outputs]
    own.given += shapes
    if not any(shape is not None for shape in shapes) or not torch.is_grad_enabled():
        return result
    if own.user_hooks and not any(shape is not None for shape in own.seen):
        _refuse(own.user_hooks[0], "only looks at gradients, for its module's inputs have none; remove it")
    if not own.user_pre_hooks:
        return result

    def run(*gradients: Any) -> Any:
        held: Any = gradients
        for hook in own.user_pre_hooks:
            made = hook(own.module, held)
            held = held if made is None else made
        return held

    made = _through(own.user_pre_hooks, run, outputs, shapes, [])
    return made if isinstance(result, tuple) else made[0]


def _through(
    hooks: Sequence[Hook], run: Hook, values: tuple[Any, ...], shapes: list[Tensor | None], given: list[Any]
) -> tuple[Any, ...]:
    """The values, with gradients that go through the hooks."""
    tracing = active_opaques()
    taken = [number for number, shape in enumerate(shapes) if shape is not None]
    tensors = [values[number] for number in taken]
    if tracing is None or not all(is_fake(tensor) for tensor in tensors):
        return values

    def of_taken(*gradients: Any) -> Any:
        whole: list[Any] = [None] * len(values)
        for number, gradient in zip(taken, gradients, strict=True):
            whole[number] = gradient
        made = run(*whole)
        made = made if isinstance(made, tuple | list) else (made,)
        return tuple(made[number] for number in taken)

    def target() -> tuple[Any, tuple[Tensor, ...]]:
        return hooked(hooks[0], [shape for shape in shapes if shape is not None], of_taken, given)

    own = Opaque(run=lambda *operands: operands, target=target, key=("module", object()))
    made = iter(tracing.call(tensors, own)[0])
    return tuple(next(made) if number in taken else value for number, value in enumerate(values))


def _like(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


def keep_parameter_hooks(captured: CapturedModel, model: nn.Module) -> CapturedModel:
    """The graph in which parameters with hooks are read through them."""
    named = dict(model.named_parameters(remove_duplicate=False))
    constants = dict(captured.constants)
    for spec in captured.parameters:
        hooks = list((getattr(named[spec.names[0]], "_backward_hooks", None) or {}).values())
        if not hooks or not spec.trainable:
            continue
        source: fx.Node = captured.nodes[spec.placeholder]
        anchor = next(n for n in captured.graph.nodes if n.op != "placeholder")
        readers = list(source.users)
        for hook in reversed(hooks):
            target, values = hooked(hook, [torch.empty(spec.shape, dtype=spec.dtype, device="meta")])
            given = [_constant_placeholder(captured, constants, model, value) for value in values]
            with captured.graph.inserting_before(anchor):
                node = captured.graph.call_function(target, (source, *given))
            node.meta = {**source.meta, "module": spec.names[0].rpartition(".")[0], "requires_grad": True}
            source = node
        for reader in readers:
            reader.replace_input_with(captured.nodes[spec.placeholder], source)
    return tidy(replace(captured, constants=constants))


def _constant_placeholder(
    captured: CapturedModel, constants: dict[str, Tensor], model: nn.Module, value: Tensor
) -> fx.Node:
    """The placeholder of a buffer of the model, or of a new constant."""
    names = {id(tensor): name for name, tensor in model.named_buffers(remove_duplicate=False)}
    for spec in captured.buffers:
        if names.get(id(value)) in spec.names:
            return captured.nodes[spec.placeholder]
    name = f"c_hook_{len(constants)}"
    inputs = {spec.placeholder for spec in captured.inputs}
    anchor = next(n for n in captured.graph.nodes if n.op != "placeholder" or n.name in inputs)
    with captured.graph.inserting_before(anchor):
        node = captured.graph.create_node("placeholder", name, name=name)
    meta: Any = {"val": value.detach().to("meta"), "requires_grad": False, "module": ""}
    node.meta = meta
    constants[node.name] = value.detach().cpu()
    return node


def hooked(
    hook: Hook, shapes: Sequence[Tensor], run: Hook | None = None, given: Sequence[Tensor | None] = ()
) -> tuple[Hooked, tuple[Tensor, ...]]:
    """What a hook makes of gradients of these shapes, and the constants that it reads.

    run: from gradients to gradients, if that is not the hook; given: other gradients that it may not read.

    Raises:
        CaptureError: if it is no plain function of the gradients.
    """
    called = run or hook
    cells = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if _is_filled(cell)]
    if any(map(is_fake, cells)):
        _refuse(hook, "reads a tensor that forward made; use gradients, constants and buffers alone")
    state = held_by(hook)
    before = [(place, dict(place) if isinstance(place, dict) else list(place)) for place in state]
    given_back: list[Any] = []
    looks: list[bool] = []

    def traced(*gradients: Tensor) -> Any:
        own, rest = gradients[: len(shapes)], list(gradients[len(shapes) :])
        if run is not None and given:
            filled = iter(rest)
            given_list: Any = given
            kept = list(given_list)
            given_list[:] = [None if shape is None else next(filled) for shape in kept]
            try:
                made = called(*own)
            finally:
                given_list[:] = kept
        else:
            made = called(*own)
        if any(gradient._version for gradient in gradients):
            _refuse(hook, "writes into the gradient; return a new one")
        if made is None:
            looks.append(True)
        made = made if isinstance(made, tuple | list) else (made,)
        given_back[:] = [part is own[i] if i < len(own) else False for i, part in enumerate(made)]
        return tuple(made)

    try:
        samples = fake_like([*shapes, *(shape for shape in given if shape is not None)])
        with torch.no_grad():
            graph = make_fx(traced, tracing_mode="real", _allow_non_fake_inputs=True)(*samples)
    except CaptureError:
        raise
    except Exception as error:
        first = str(error).strip().split("\n")[0]
        _refuse(hook, f"is no plain function of the gradient: {type(error).__name__}: {first}; a hook computes "
                "with tensors alone")  # fmt: skip
    finally:
        changed = any(was != (dict(now) if isinstance(now, dict) else list(now)) for now, was in before)
        for place, was in before:
            place.clear()
            (place.update if isinstance(place, dict) else place.extend)(was)
    if changed:
        _refuse(hook, "writes down what it sees, which ranks would see parts of; let it return a gradient alone")
    if looks or all(given_back):
        _refuse(hook, "only looks at the gradient, of which ranks have parts; remove it")
    return _program(hook, graph, len(shapes))


def held_by(hook: Any) -> list[Any]:
    """Lists and dicts that a hook can write into without anybody seeing it."""
    function = getattr(hook, "__func__", hook)
    cells = [cell.cell_contents for cell in getattr(function, "__closure__", None) or () if _is_filled(cell)]
    owner = getattr(hook, "__self__", None)
    objects = [*cells, owner]
    held = [value for value in objects if type(value) in (list, dict)]
    for one in objects:
        if isinstance(one, nn.Module) or (hasattr(one, "__dict__") and not isinstance(one, type)):
            held += [vars(one), *(value for value in vars(one).values() if type(value) in (list, dict))]
    return held


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _program(hook: Hook, graph: fx.GraphModule, count: int) -> tuple[Hooked, tuple[Tensor, ...]]:
    """The steps of a traced hook."""
    numbers: dict[fx.Node, int] = {}
    constants: list[Tensor] = []
    for node in graph.graph.nodes:
        if node.op == "placeholder" and len(numbers) < count:
            numbers[node] = len(numbers)
        elif node.op == "placeholder" and node.users:
            _refuse(hook, "reads gradients of its module's outputs, which are elsewhere; use those of inputs alone")
        elif node.op == "get_attr":
            value = getattr(graph, str(node.target))
            if not isinstance(value, Tensor) or is_fake(value):
                _refuse(hook, "reads a tensor that forward made; use gradients, constants and buffers alone")
            numbers[node] = count + len(constants)
            constants.append(value)
    steps: list[Any] = []
    for node in graph.graph.nodes:
        if node.op == "call_function":
            if not isinstance(node.target, torch._ops.OpOverload) or node.target._schema.is_mutable:
                _refuse(hook, f"writes into the gradient ({node.target}); return a new one")
            if torch.Tag.nondeterministic_seeded in node.target.tags:
                _refuse(hook, f"draws random numbers ({node.target}), which ranks could not agree on")
            numbers[node] = count + len(constants) + len(steps)
            slot_of: Any = lambda n: ArgumentSlot(numbers[n])  # noqa: E731
            slots: Any = fx.node.map_arg((node.args, dict(node.kwargs)), slot_of)
            args, kwargs = _plain(slots[0]), tuple((k, _plain(v)) for k, v in sorted(slots[1].items()))
            steps.append((str(node.target), args, kwargs))
    output: Any = next(n for n in graph.graph.nodes if n.op == "output").args[0]
    results = [output] if isinstance(output, fx.Node) or output is None else list(output)
    made = tuple(ArgumentSlot(numbers[n]) if isinstance(n, fx.Node) else None for n in results)
    return Hooked(count, tuple(steps), made), tuple(constants)


def _plain(value: Any) -> Any:
    """Arguments as tuples, so that they can be compared."""
    if isinstance(value, tuple | list):
        return tuple(_plain(part) for part in value)
    return value
