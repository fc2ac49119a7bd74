"""What a plan is lowered for, and what a rank has of each op and tensor there: layouts, messages, bytes.

A target is a mesh, a training configuration and the kind of device, on which depends what attention keeps. It knows no
seconds: prices are `search.costs.pricing`'s.
"""

from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from autopar.cost_models.memory import optimizer_state_nbytes
from autopar.lower.program import Op, Tensor
from autopar.ops.attention import attention
from autopar.rules.rule import Local, is_divisible, layouts, localized, splits
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout, local_shape
from autopar.values.redistribution import Message, Step, messages
from autopar.values.train_config import TrainConfig

Split = tuple[tuple[str, int], ...]
"""Names of factors, each with the number of parts that mesh axes split it into."""

Layouts = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""Of operands and of results."""


class OpSizes(NamedTuple):
    """Bytes of one op on a rank, however the rest of the mesh is arranged.

    working_forward, working_backward: beside operands and results that are saved or are parameters.
    spare_forward, spare_backward: what it allocates beside (`rules.spare`), among the former.
    kept: what autograd keeps beside saved operands and results.
    """

    working_forward: int
    working_backward: int
    spare_forward: int
    spare_backward: int
    kept: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalOp:
    """One op under one choice an axis: layouts, what its own body sends in each pass, and its sizes."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    forward_messages: tuple[Message, ...]
    backward_messages: tuple[Message, ...]
    sizes: OpSizes


@dataclass(frozen=True, slots=True, eq=False)
class OnAnyMesh:
    """What is known of the ops of a program, by signature, on any mesh of devices of one kind.

    seconds: forward and backward, where somebody prices them.
    """

    sizes: dict[tuple[int, Split], OpSizes] = field(default_factory=dict)
    seconds: dict[tuple[int, Split], tuple[float, float]] = field(default_factory=dict)
    allowed: dict[tuple[int, Split], bool] = field(default_factory=dict)
    layouts: dict[tuple[int, tuple[str, ...]], Layouts] = field(default_factory=dict)


@dataclass(kw_only=True, eq=False)
class Target:
    """Layouts, messages and bytes of one program's ops on one mesh: signatures of another program mean other ops.

    on_host: whether the device is the host, whose attention has a kernel for other cases than a GPU's.
    exact_random: whether dropout draws what one process does, for which attention is written out (`ops.attention`):
        it keeps its operands themselves, whatever the device.
    ops: what is known of the program's ops on any mesh of such devices.
    """

    mesh: Mesh
    config: TrainConfig
    on_host: bool
    exact_random: bool = False
    ops: OnAnyMesh = field(default_factory=OnAnyMesh)
    _ops: dict[tuple[int, tuple[str, ...]], LocalOp] = field(default_factory=dict, init=False)
    _nbytes: dict[tuple[tuple[int, ...], int, Layout], int] = field(default_factory=dict, init=False)
    _wholes: dict[tuple[Step, tuple[int, ...], int], tuple[int, int]] = field(default_factory=dict, init=False)
    _splits: dict[tuple[str, ...], Split] = field(default_factory=dict, init=False)

    def for_another(self, ops: OnAnyMesh) -> "Target":
        """The same for another program; bytes of tensors are known already."""
        other = replace(self, ops=ops)
        other._nbytes, other._wholes, other._splits = self._nbytes, self._wholes, self._splits
        return other

    def within(self, config: TrainConfig) -> "Target":
        """The same under another memory limit, on which nothing here depends."""
        other = self.for_another(self.ops)
        other.config, other._ops = config, self._ops
        return other

    def op(self, op: Op, names: tuple[str, ...]) -> LocalOp:
        """What a rank has of an op under the choices called `names`, one a mesh axis."""
        key = (op.signature, names)
        found = self._ops.get(key)
        if found is None:
            found = self._ops[key] = self._local_op(op, names)
        return found

    def _local_op(self, op: Op, names: tuple[str, ...]) -> LocalOp:
        wanted, given = self.layouts(op, names)
        forward: tuple[Message, ...] = ()
        backward: tuple[Message, ...] = ()
        if op.rule.messages is not None:
            forward, backward = op.rule.messages(self.local(op, names))
        key = op.signature, self.split(names)
        sizes = self.ops.sizes.get(key)
        if sizes is None:
            sizes = self.ops.sizes[key] = self._sizes(op, names)
        return LocalOp(
            operands=wanted,
            results=given,
            forward_messages=forward,
            backward_messages=backward if op.has_backward else (),
            sizes=sizes,
        )

    def _sizes(self, op: Op, names: tuple[str, ...]) -> OpSizes:
        rule, local = op.rule, self.local(op, names)
        operands, results = self.sides(op, names)
        parts = local.parts()
        saves, saves_results = self.saves(op) if op.has_backward else ((), ())
        unsaved = [n for i, n in enumerate(operands) if i not in saves and i not in op.parameters]
        unsaved += [n for i, n in enumerate(results) if i not in saves_results]
        gradients = [n for i, n in enumerate(operands) if op.operand_grads[i] and i not in op.handed]
        gradients += [n for n, g in zip(results, op.result_grads, strict=True) if g]
        if rule.spare is None:
            ahead, back = (round(part * max([*operands, *results], default=0)) for part in op.spare)
        else:
            ahead, back = (n * op.result_sizes[0] for n in rule.spare(local.operand_shapes, local.result_shapes))
        kept = -(-rule.saves_nbytes // parts)
        if self.are_products(op):
            weights = -(-rule.products_nbytes // parts)  # scores and their softmax; the gradients of both
            kept, ahead, back = sum(operands[:3]) + weights, ahead + weights, back + 2 * weights
        is_view = rule.alias is not None
        return OpSizes(
            working_forward=0 if is_view else sum(unsaved) + ahead,
            working_backward=0 if is_view or not op.has_backward else sum(gradients) + back,
            spare_forward=ahead,
            spare_backward=back if op.has_backward else 0,
            kept=kept if op.has_backward else 0,
        )

    def saves(self, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Operands and results that autograd keeps of an op with a backward pass; products keep copies instead."""
        return ((), ()) if self.are_products(op) else (op.rule.saves, op.rule.saves_results)

    def are_products(self, op: Op) -> bool:
        """Whether the op is attention for which the device has no kernel."""
        if self.exact_random and op.node.target is attention:
            return False
        return op.rule.products_on_host if self.on_host else op.rule.products_on_gpu

    def is_allowed(self, op: Op, names: tuple[str, ...]) -> bool:
        """Whether the sizes of the op can be split so."""
        key = op.signature, self.split(names)
        found = self.ops.allowed.get(key)
        if found is None:
            found = self.ops.allowed[key] = is_divisible(op.rule, dict(key[1]))
        return found

    def split(self, names: tuple[str, ...]) -> Split:
        """By what choices split the work, into how many parts: all that sizes on a rank depend on."""
        if names not in self._splits:
            parts: dict[str, int] = {}
            for name, size in zip(names, self.mesh.shape, strict=True):
                if splits(name):
                    parts[name] = parts.get(name, 1) * size
            self._splits[names] = tuple(sorted(parts.items()))
        return self._splits[names]

    def layouts(self, op: Op, names: tuple[str, ...]) -> Layouts:
        """Of operands and results."""
        key = op.signature, names
        found = self.ops.layouts.get(key)
        if found is None:
            chosen = tuple(op.choices[n] for n in names)
            found = self.ops.layouts[key] = layouts(chosen, op.operand_grads, op.result_grads)
        return found

    def local(self, op: Op, names: tuple[str, ...]) -> Local:
        """Shapes of what a rank has of an op."""
        chosen = tuple(op.choices[n] for n in names)
        wanted, given = self.layouts(op, names)
        return localized(op.node, chosen, self.mesh, wanted, given, op.operand_shapes, op.result_shapes)

    def sides(self, op: Op, names: tuple[str, ...]) -> tuple[list[int], list[int]]:
        """Bytes of a rank's operands and results."""
        wanted, given = self.layouts(op, names)
        operands = [self.nbytes(*t) for t in zip(op.operand_shapes, op.operand_sizes, wanted, strict=True)]
        return operands, [self.nbytes(*t) for t in zip(op.result_shapes, op.result_sizes, given, strict=True)]

    def sum_size(self, element_size: int, parameter: bool) -> int:
        """Bytes of an element of a gradient on its way."""
        return self.config.reduced_size(element_size) if parameter else element_size

    def widening(self, tensor: Tensor) -> int:
        """How many times as wide gradients of a tensor are summed as they are made."""
        return self.sum_size(tensor.element_size, tensor.kind == "parameter") // tensor.element_size

    def wholes(self, step: Step, shape: tuple[int, ...], element_size: int) -> tuple[int, int]:
        """Bytes of what a step gathers, scatters, exchanges or slices forward, and back; padding included."""
        key = (step, shape, element_size)
        if key not in self._wholes:
            sent = messages(step, shape, element_size, self.mesh)
            n = prod(self.mesh.shape[axis] for axis in step.axes)
            sides = (self.nbytes(shape, element_size, layout) for layout in (step.target, step.source))
            ahead, back = (m[0].nbytes if m else n * side for m, side in zip(sent, sides, strict=True))
            self._wholes[key] = ahead, back
        return self._wholes[key]

    def nbytes(self, shape: tuple[int, ...], element_size: int, layout: Layout) -> int:
        """Bytes of a rank's part of a tensor."""
        key = (shape, element_size, layout)
        if key not in self._nbytes:
            self._nbytes[key] = element_size * prod(local_shape(shape, layout, self.mesh))
        return self._nbytes[key]

    def local_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        """The same, as it is computed on."""
        return self.nbytes(tensor.shape, tensor.element_size, layout)

    def stored_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        """Bytes of a parameter as it is stored, and of its gradient."""
        return self.nbytes(tensor.shape, tensor.stored_size, layout)

    def cast_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        """Bytes of the rank's part in the dtype that is computed on, 0 where that is what is stored."""
        return self.local_nbytes(tensor, layout) if tensor.is_cast else 0

    def is_split(self, tensor: Tensor, storage: Layout) -> bool:
        """Whether the rank has a part of a parameter alone."""
        return self.local_nbytes(tensor, storage) < prod(tensor.shape) * tensor.element_size

    def state_nbytes(self, tensor: Tensor, storage: Layout) -> int:
        """Optimizer state of the rank's shard."""
        elements = self.local_nbytes(tensor, storage) // tensor.element_size
        return elements * optimizer_state_nbytes(self.config.optimizer, tensor.stored_size)
