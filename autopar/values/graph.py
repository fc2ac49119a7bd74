"""What was captured: a normalised forward graph, and what each of its placeholders is.

The graph is functional ATen (plus `autopar.ops`), its placeholders are parameters, buffers, constants and inputs (in
this order), its output is `(loss, *mutated_buffers, *mutated_parameters)` and, in a micro-batch's graph, perhaps the
count of labels (`Accumulation`). The graph of a call (`capture.capture_call`) has what the model returns in place of
the loss. The last inputs of a pipeline's stage (`passes.split_stages`) are what the stage before sends, and all stages
but the last return what they send on in place of the loss. Every node carries

    node.meta["val"]            torch.Tensor on the meta device (or a tuple of them): global shape and dtype
    node.meta["requires_grad"]  bool: a trainable parameter is upstream and the dtype is floating
    node.meta["module"]         str: path of the innermost module that made it, e.g. "model.layers.0.mlp" ("" at top)
"""

import hashlib
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import fx

from autopar.values.guards import BufferGuard
from autopar.values.schema import of_file


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """A parameter; `names` holds every qualified name under which a tied weight is known.

    dtype: of what is computed on; stored: of what is stored and trained, where that is another (`precision`).
    mutated_by: the node whose value forward writes into it.
    """

    placeholder: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    stored: torch.dtype | None = None
    mutated_by: str | None = None

    @property
    def storage(self) -> torch.dtype:
        """dtype of the parameter, its gradient and its checkpoints."""
        return self.dtype if self.stored is None else self.stored


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferSpec:
    """A buffer of the module; `mutated_by` names the node whose value replaces it after each step."""

    placeholder: str
    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    persistent: bool
    mutated_by: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """A tensor input: a keyword (`input_ids`) or a position (`0`), possibly nested (`batch.pixel_values`)."""

    placeholder: str
    path: str
    shape: tuple[int, ...]
    dtype: torch.dtype


@of_file
@dataclass(frozen=True, slots=True, kw_only=True)
class Accumulation:
    """How the micro-batches of a step make its loss and gradients: `scale · sum over micro-batches of weight · loss`.

    scale is 1 or, where the loss is a mean over labels that count, `rows / sum of count`, count being the last output.
    """

    microbatches: int
    weight: float
    count: str | None = None
    rows: float = 0.0


@dataclass(frozen=True, kw_only=True)
class CapturedModel:
    """A model's forward pass and loss as one functional graph, at its global batch shapes.

    accumulation: None where a step is one batch; else the graph is that of one of its micro-batches
    (`passes.accumulate_gradients`).
    copies: how many micro-batches run at once, each with inputs of its own (`passes.weave_copies`).
    received: those of the inputs, at their end, that the stage before sends; sends: values that the next stage
    receives, in the same order. Both are empty for a whole model. loss is empty for all stages but the last.
    outputs: of the graph of a call, which returns what the model does: those of its tensors, and no loss. A stage's are
    those that it makes, after what it sends.
    guards: buffers whose values the graph takes for granted. training: the model's mode.
    """

    name: str
    graph: fx.Graph
    parameters: tuple[ParameterSpec, ...]
    buffers: tuple[BufferSpec, ...]
    inputs: tuple[InputSpec, ...]
    loss: str
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    accumulation: Accumulation | None = None
    copies: int = 1
    received: tuple[str, ...] = ()
    sends: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    guards: tuple[BufferGuard, ...] = ()
    training: bool = True

    @property
    def ends(self) -> tuple[str, ...]:
        """Names of the output's first values: the loss, or what is sent on, or what a call returns. Backward begins at
        those with gradients."""
        return (self.loss,) if self.loss else (*self.sends, *self.outputs)

    @property
    def is_stage(self) -> bool:
        """Whether this is a stage of a pipeline."""
        return bool(self.received or self.sends)

    @property
    def microbatches(self) -> int:
        return 1 if self.accumulation is None else self.accumulation.microbatches

    def accumulated(self, accumulation: Accumulation) -> "CapturedModel":
        """The same graph, of one of the micro-batches that make a step so."""
        made = copy(self)  # `replace` would look at a graph that is not made yet (`passes.batch_line.DeferredGraph`)
        vars(made)["accumulation"] = accumulation
        return made

    @property
    def results(self) -> tuple[str, ...]:
        """Names of the output's values after `ends`: new values of buffers and parameters, the count of labels."""
        mutated = tuple(spec.mutated_by for spec in self.written if spec.mutated_by is not None)
        count = self.accumulation.count if self.accumulation is not None else None
        return mutated if count is None else (*mutated, count)

    @property
    def written(self) -> "tuple[BufferSpec | ParameterSpec, ...]":
        """What forward writes, in the order of new values among `results`: buffers, then parameters."""
        specs: list[BufferSpec | ParameterSpec] = [*self.buffers, *self.parameters]
        return tuple(spec for spec in specs if spec.mutated_by is not None)

    @cached_property
    def nodes(self) -> dict[str, fx.Node]:
        return {node.name: node for node in self.graph.nodes}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the graph's text, shapes and dtypes: equal for equal models on every rank and machine."""
        digest = hashlib.sha256()
        for node in self.graph.nodes:
            value = node.meta.get("val")
            shape = (tuple(value.shape), str(value.dtype)) if isinstance(value, torch.Tensor) else ""
            kwargs = sorted(
                item for item in node.kwargs.items() if item[0] != "message"
            )  # names a file of this machine
            line = f"{node.op} {node.name} {target_name(node.target)} {node.args} {kwargs} {shape}"
            digest.update(f"{line}\n".encode())
        for parameter in self.parameters:
            line = f"{parameter.names} {parameter.shape} {parameter.dtype} {parameter.trainable}"
            line += "" if parameter.stored is None else f" stored {parameter.stored}"
            digest.update(f"{line}\n".encode())
        return digest.hexdigest()[:16]


def target_name(target: object) -> str:
    """Stable name of a node's target: `aten.linear.default`, `cross_entropy`, `getitem`."""
    if isinstance(target, torch._ops.OpOverload):
        return str(target)
    return str(getattr(target, "__name__", target))


def called_name(node: fx.Node) -> str:
    """As `target_name`; of an op of ATen that `ops.drawn` runs, the op's."""
    name = target_name(node.target)
    return f"aten.{node.args[0]}" if name == "drawn" else name


def operands(node: fx.Node) -> tuple[fx.Node, ...]:
    """Tensor operands of a node in argument order, lists flattened, repeated operands repeated."""
    out: list[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), lambda n: out.append(n))
    return tuple(out)


LABELS = ("site",)
"""Keywords that tell call sites apart, and differ from block to block."""


SWITCHES = {"dropout": 0.0, "dropout_p": 0.0, "train": False, "training": False}
"""Arguments of ops of ATen that draw, and their values where nothing is drawn."""


def is_random(node: fx.Node) -> bool:
    """Whether a call draws random numbers: one of `autopar.ops` that names its site, or an op of ATen."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "site" in node.kwargs
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = {argument.name: argument.default_value for argument in target._schema.arguments}
    given |= {**dict(zip(given, node.args, strict=False)), **node.kwargs}
    return not any(name in given and given[name] == value for name, value in SWITCHES.items())


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """Global shape of a single-result node."""
    return tuple(node.meta["val"].shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def requires_grad(node: fx.Node) -> bool:
    return bool(node.meta.get("requires_grad", False))


def is_same_graph(one: CapturedModel, other: CapturedModel) -> bool:
    """Whether two graphs of a model compute the same: calls alike, in order, on the same values."""
    return _words(one) == _words(other)


def _words(captured: CapturedModel) -> list[object]:
    """A graph's calls in words, constants by their values, other placeholders by name."""
    known: dict[fx.Node, str] = {}
    words: list[object] = []
    for node in captured.graph.nodes:
        if node.op == "placeholder" and node.name in captured.constants:
            value = captured.constants[node.name].contiguous()
            data = hashlib.sha256(value.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            known[node] = f"{tuple(value.shape)} {value.dtype} {data}"
        elif node.op == "placeholder":
            known[node] = node.name
        else:
            given = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: _Word(known[n]))
            words.append((target_name(node.target), str(given)))
            known[node] = f"call {len(words)}"
    return words


class _Word(str):
    __slots__ = ()
