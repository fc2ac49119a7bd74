"""How does an exported folder train? Its `forward`s in place of the stages' graphs, in the same distributed module.

The folder holds the plan, a file of code a stage, what each tensor is (specs.json, of the whole model and of each
stage) and values that no one can make up (state.pt: constants, and buffers that had values). Parameters start as
`initial` says, or come from a checkpoint.
"""

import hashlib
import inspect
import io
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn

from autopar.errors import ArgumentError, PlanFileError, PlanMismatchError
from autopar.lower.legality import Held, check_held
from autopar.passes.recompute import wrapped
from autopar.runtime.evaluation import evaluation_graph
from autopar.runtime.module import DistributedModule
from autopar.runtime.pipeline import PipelinedModule, StagedModel
from autopar.runtime.trainable import Trainable
from autopar.values.graph import BufferSpec, CapturedModel, InputSpec, ParameterSpec
from autopar.values.local_model import LocalModel
from autopar.values.placement import Layout, local_shape
from autopar.values.plan import decided
from autopar.values.plan_file import load_plan
from autopar.values.specs_file import Specs, load_specs
from autopar.values.stage_plan import StagePlan

SPECS, STATE = "specs.json", "state.pt"
Initial = Callable[[str, tuple[int, ...], torch.dtype], Tensor]
"""Whole value of a parameter from its name, shape and dtype."""


def block(w: Mapping[str, Tensor], prefix: str, table: Mapping[str, str]) -> dict[str, Tensor]:
    """The parameters of one block as keywords: `table` maps argument names to names below `prefix`."""
    return {argument: w[f"{prefix}.{name}"] for argument, name in table.items()}


def load_exported(
    folder: str | Path, forwards: Sequence[Callable[..., Any]], initial: Initial, *, seed: int | None = None
) -> Trainable:
    """The distributed module of an exported folder; all ranks call this together, after `init`.

    Args:
        folder: where plan.json, specs.json and, if any, state.pt lie.
        forwards: of the folder's files of code, a stage each, in order.
        initial: values to start from; rank 0's count.
        seed: of random numbers; None for that of rank 0's torch generator.

    Raises:
        PlanMismatchError: if a file is missing, of another library version, or not of these stages.
        MeshError, RankError: as `DistributedModule`.
    """
    root = Path(folder)
    plan, specs = load_plan(root / "plan.json"), load_specs(root / SPECS)
    parts = specs.stages
    if not len(parts) == len(forwards) == plan.num_stages:
        raise PlanMismatchError(
            f"{root} has a plan of {plan.num_stages} stages and specs of {len(parts)}, {len(forwards)} forwards were "
            "given; give one of each file of code, or export the model again"
        )
    if decided(plan) != specs.plan:
        raise PlanFileError(
            f"{root / 'plan.json'} is not the plan that the code beside it was written for; export the plan again"
        )
    held = _held(root, specs.state)
    stages = [
        captured_from(part, _constants(part, held, root), source_hash(forward))
        for part, forward in zip(parts, forwards, strict=True)
    ]
    for stage, own in zip(stages, plan.stages, strict=True):
        check_held([*_tensors(stage)], own)

    def local(number: int) -> LocalModel:
        graph = call_graph(stages[number], plan.stages[number], forwards[number], parts[number].table.axes)
        return LocalModel(captured=stages[number], plan=plan.stages[number], graph=graph)

    if plan.num_stages == 1:
        return ExportedModule(local(0), Values(stages[0], held, initial), seed=seed)
    codes = hashlib.sha256("".join(map(source_hash, forwards)).encode()).hexdigest()[:16]
    captured = captured_from(specs.whole, {}, codes)
    model = StagedModel(
        captured=captured, stages=stages, plan=plan, local=local, written=_written, loss_dtype=specs.loss_dtype
    )
    return PipelinedModule(model, Values(captured, held, initial), seed=seed)


def _written(local: LocalModel, training: bool) -> fx.Graph:
    traced = trace_exported(local, keep_again=training)
    return traced if training else evaluation_graph(traced)


def _held(root: Path, digest: str | None) -> dict[str, Tensor]:
    """The values of state.pt, which holds tensors by name and nothing else; digest: of its bytes, None of no file."""
    path = root / STATE
    if digest is None and not path.exists():
        return {}
    try:
        content = path.read_bytes() if path.is_file() else b""
        if hashlib.sha256(content).hexdigest() != digest:
            raise PlanFileError(f"{path} is missing, or not as it was written: its digest is another; export again")
        held = torch.load(io.BytesIO(content), weights_only=True)
    except PlanFileError:
        raise
    except Exception as error:  # torch says what it found in several types
        raise PlanFileError(f"{path} cannot be read ({error}); export the model again") from error
    if not isinstance(held, dict) or not all(isinstance(value, Tensor) for value in held.values()):
        raise PlanFileError(f"{path} holds something else than tensors by name; export the model again")
    return held


def _constants(part: Specs, held: Mapping[str, Tensor], root: Path) -> dict[str, Tensor]:
    if missing := [name for name in part.table.constants if name not in held]:
        raise PlanFileError(f"{root / STATE} lacks {', '.join(missing[:3])}; export the model again")
    return {name: held[name] for name in part.table.constants}


def _tensors(captured: CapturedModel) -> Iterator[Held]:
    labels = {spec.placeholder: spec.names[0] for spec in captured.parameters}
    trained = {spec.placeholder for spec in captured.parameters if spec.trainable}
    kinds = {spec.placeholder: "parameter" for spec in captured.parameters}
    kinds |= {spec.placeholder: "buffer" for spec in captured.buffers}
    kinds |= {spec.placeholder: "input" for spec in captured.inputs} | dict.fromkeys(captured.received, "received")
    for name, node in captured.nodes.items():
        if node.op == "placeholder":
            shape, kind = tuple(node.meta["val"].shape), kinds.get(name, "constant")
            yield Held(name=name, label=labels.get(name, name), kind=kind, shape=shape, requires_grad=name in trained)


class ExportedModule(DistributedModule):
    """A distributed module whose graph is one call of exported code."""

    def compile(self, *, backend: str = "inductor", by_block: bool = False) -> None:
        if by_block:
            raise ArgumentError("exported code compiles as one graph, as its reader left it; leave out by_block=True")
        super().compile(backend=backend)

    def _written(self) -> fx.Graph:
        if not self.training:
            # Dropout and batch statistics are inside the call: trace it to take them out.
            return evaluation_graph(trace_exported(self.local, keep_again=False))
        # What runs once a step, and what goes together, is inside the call too.
        whole = self.local.captured.accumulation is None and not self.plan.buckets
        return self.local.graph if whole else trace_exported(self.local, keep_again=True)


class Values(Mapping[str, Tensor]):
    """Values by placeholder, made one at a time."""

    def __init__(self, captured: CapturedModel, held: Mapping[str, Tensor], initial: Initial) -> None:
        self.held, self.initial = held, initial
        self.specs: dict[str, ParameterSpec | BufferSpec] = {p.placeholder: p for p in captured.parameters}
        self.specs |= {b.placeholder: b for b in captured.buffers}

    def __getitem__(self, placeholder: str) -> Tensor:
        spec = self.specs[placeholder]
        if placeholder in self.held:
            return self.held[placeholder]
        if isinstance(spec, BufferSpec):
            return torch.empty(spec.shape, dtype=spec.dtype, device="meta")
        return self.initial(spec.names[0], spec.shape, spec.storage)

    def __iter__(self) -> Iterator[str]:
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)


class Adapter:
    """The exported forward as a call of the graph's placeholders in order."""

    def __init__(self, forward: Callable[..., Any], captured: CapturedModel) -> None:
        self.forward = forward
        self.__name__ = f"exported_{source_hash(forward)}"
        self.state: list[tuple[str, tuple[str, ...]]] = [(s.placeholder, s.names) for s in captured.parameters]
        self.state += [(s.placeholder, s.names) for s in captured.buffers]
        self.state += [(name, (name,)) for name in captured.constants]

    def __call__(self, *values: Any, axes: Any = ()) -> Any:
        w = {name: value for (_, names), value in zip(self.state, values, strict=False) for name in names}
        return self.forward(w, *values[len(self.state) :])


def source_hash(forward: Callable[..., Any]) -> str:
    """Of the module that defines `forward`: ranks that run different code must find out."""
    module = inspect.getmodule(forward)
    text = inspect.getsource(module) if module is not None else inspect.getsource(forward)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def captured_from(specs: Specs, constants: Mapping[str, Tensor], code: str) -> CapturedModel:
    """The specs as a captured model whose graph has only placeholders; its output is the hash of the code."""
    graph, table = fx.Graph(), specs.table
    differentiable = set(table.differentiable)
    for name, shape, dtype in _placeholders(specs.parameters, specs.buffers, constants, specs.inputs):
        node = graph.placeholder(name)
        value = torch.empty(shape, dtype=dtype, device="meta")
        node.meta.update(val=value, module="", requires_grad=name in differentiable)
    graph.output((code,))
    return CapturedModel(
        name=table.model,
        graph=graph,
        parameters=specs.parameters,
        buffers=specs.buffers,
        inputs=specs.inputs,
        loss=table.loss,
        constants=constants,
        accumulation=table.accumulation,
        received=table.received,
        sends=table.sends,
        guards=table.guards,
    )


def call_graph(
    captured: CapturedModel, plan: StagePlan, forward: Callable[..., Any], axes: tuple[tuple[str, ...], ...]
) -> fx.Graph:
    """Placeholders with local shapes, one call of `forward`, its results; `axes`: what collectives use together."""
    graph = fx.Graph()
    nodes = []
    for name, shape, dtype in _placeholders(captured.parameters, captured.buffers, captured.constants, captured.inputs):
        node = graph.placeholder(name)
        layout: Layout = plan.layouts[name]
        node.meta.update(val=torch.empty(local_shape(shape, layout, plan.mesh), dtype=dtype, device="meta"))
        node.meta.update({"layouts": (layout,), "global": (shape,)})
        node.meta["requires_grad"] = captured.nodes[name].meta["requires_grad"]
        nodes.append(node)
    call = graph.call_function(Adapter(forward, captured), tuple(nodes), {"axes": axes})
    num_results = len(captured.ends) + len(captured.results)
    graph.output(tuple(graph.call_function(operator.getitem, (call, i)) for i in range(num_results)))
    return graph


def trace_exported(local: LocalModel, *, keep_again: bool) -> fx.Graph:
    """The calls that exported code makes, autopar's functions as single calls; `keep_again`: with their replays."""
    calls = (n.target for n in local.graph.nodes if n.op == "call_function" and n.target is not operator.getitem)
    forward: Any = next(calls)
    code = forward.forward.__globals__
    ours = {k: v for k, v in code.items() if callable(v) and getattr(v, "__module__", "").startswith("autopar.ops")}
    names = [node.name for node in local.graph.nodes if node.op == "placeholder"]
    tracer = fx.Tracer()
    root = nn.Module()
    tracer.root, tracer.graph, tracer.tensor_attrs = root, fx.Graph(tracer_cls=fx.Tracer), {}
    proxies = [tracer.create_proxy("placeholder", name, (), {}, name=name) for name in names]

    def leaf(function: Any) -> Any:
        return lambda *args, **kwargs: tracer.create_proxy("call_function", function, args, kwargs)

    leaves = {name: leaf(function) for name, function in ours.items()}
    originals = {leaves[name]: function for name, function in ours.items()}

    def again(function: Any, *args: Any, **kwargs: Any) -> Any:
        if not keep_again:
            return function(*args, **kwargs)
        return leaf(wrapped(originals.get(function, function)))(*args, **kwargs)

    code.update(leaves)
    if "again" in ours:
        code["again"] = again
    try:
        results = forward(*proxies)
    finally:
        code.update(ours)
    tracer.create_node("output", "output", (tracer.create_arg(results),), {})
    return tracer.graph


def _placeholders(
    parameters: tuple[ParameterSpec, ...],
    buffers: tuple[BufferSpec, ...],
    constants: Mapping[str, Tensor],
    inputs: tuple[InputSpec, ...],
) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    for parameter in parameters:
        yield parameter.placeholder, parameter.shape, parameter.dtype
    for buffer in buffers:
        yield buffer.placeholder, buffer.shape, buffer.dtype
    for name, value in constants.items():
        yield name, tuple(value.shape), value.dtype
    for spec in inputs:
        yield spec.placeholder, spec.shape, spec.dtype
