"""What does one choice of one op cost, and one redistribution step? Cached prices for evaluation and search alike.

Compute is the roofline of `cost_models.compute` on local shapes; views cost nothing. Forward moves the bytes of its
local operands and results, backward moves them twice (values read again, gradients written). Collectives are α–β on
the links of their axes. Nothing overlaps yet: the runtime waits for every collective where it stands, so a step is a
plain sum.
"""

from dataclasses import dataclass, field

from autopar.cluster import Cluster
from autopar.cost_models.collectives import Form, cheapest, least
from autopar.cost_models.compute import compute_seconds
from autopar.cost_models.links import axis_links
from autopar.cost_models.memory import optimizer_state_nbytes, optimizer_step_seconds
from autopar.mesh import Mesh
from autopar.placement import Layout, local_shape
from autopar.plan import TrainConfig
from autopar.redistribution import Message, Step, messages
from autopar.rules.rule import is_splittable, layouts, localized
from autopar.search.program import Op, Tensor

Timed = tuple[tuple[str, float], ...]
"""Pairs (collective, seconds)."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPrice:
    """One op under one choice an axis. Bytes of one rank: `working` beside operands and results that are saved or are
    parameters, `kept` what autograd keeps beside saved operands and results."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    forward: float
    backward: float
    forward_sent: Timed
    backward_sent: Timed
    seconds: float
    working_forward: int
    working_backward: int
    kept: int


@dataclass(slots=True, kw_only=True)
class Pricer:
    """Prices on one mesh of one cluster."""

    mesh: Mesh
    cluster: Cluster
    config: TrainConfig
    _ops: dict[tuple[int, tuple[str, ...]], OpPrice] = field(default_factory=dict)
    _steps: dict[tuple[Step, tuple[int, ...], int], tuple[Timed, Timed]] = field(default_factory=dict)
    _forms: dict[tuple[str, tuple[int, ...]], tuple[Form, ...]] = field(default_factory=dict)
    _sent: dict[tuple[str, tuple[int, ...], int], tuple[float, str]] = field(default_factory=dict)
    _bytes: dict[tuple[tuple[int, ...], int, Layout], int] = field(default_factory=dict)

    def message(self, kind: str, axes: tuple[int, ...], nbytes: int) -> tuple[float, str]:
        """Seconds of a collective along mesh axes, and the algorithm that takes them."""
        key = (kind, axes, nbytes)
        found = self._sent.get(key)
        if found is None:
            forms = self._forms.get((kind, axes))
            if forms is None:
                forms = cheapest(kind, axis_links(self.cluster, self.mesh.shape, axes))
                self._forms[kind, axes] = forms
            found = self._sent[key] = least(forms, nbytes)
        return found

    def timed(self, sent: tuple[Message, ...]) -> Timed:
        return tuple((m.kind, self.message(m.kind, m.axes, m.nbytes)[0]) for m in sent)

    def step(self, step: Step, shape: tuple[int, ...], element_size: int) -> tuple[Timed, Timed]:
        """Collectives of the forward and of the backward pass of one redistribution step."""
        key = (step, shape, element_size)
        if key not in self._steps:
            forward, backward = messages(step, shape, element_size, self.mesh)
            self._steps[key] = self.timed(forward), self.timed(backward)
        return self._steps[key]

    def nbytes(self, shape: tuple[int, ...], element_size: int, layout: Layout) -> int:
        key = (shape, element_size, layout)
        if key not in self._bytes:
            total = element_size
            for size in local_shape(shape, layout, self.mesh):
                total *= size
            self._bytes[key] = total
        return self._bytes[key]

    def local_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        return self.nbytes(tensor.shape, tensor.element_size, layout)

    def is_allowed(self, op: Op, names: tuple[str, ...]) -> bool:
        return is_splittable(op.rule, tuple(op.choices[n] for n in names), self.mesh)

    def op(self, op: Op, names: tuple[str, ...]) -> OpPrice:
        """The price of `op` under the choices called `names`, one a mesh axis."""
        key = (op.signature, names)
        price = self._ops.get(key)
        if price is None:
            price = self._ops[key] = self._price(op, names)
        return price

    def _price(self, op: Op, names: tuple[str, ...]) -> OpPrice:
        rule, mesh, device = op.rule, self.mesh, self.cluster.device
        chosen = tuple(op.choices[n] for n in names)
        wanted, given = layouts(chosen, op.operand_grads, op.result_grads)
        sizes = [self.nbytes(*t) for t in zip(op.operand_shapes, op.operand_sizes, wanted, strict=True)]
        results = [self.nbytes(*t) for t in zip(op.result_shapes, op.result_sizes, given, strict=True)]
        local = localized(op.node, chosen, mesh, wanted, given, op.operand_shapes, op.result_shapes)
        parts = local.parts()
        forward = backward = 0.0
        forward_sent: Timed = ()
        backward_sent: Timed = ()
        if rule.alias is None:
            moved = sum(sizes) + sum(results)
            forward = compute_seconds(rule.flops / parts, moved, op.dtype, device)
            if op.has_backward:
                flops = 2 * rule.flops if rule.backward_flops is None else rule.backward_flops
                backward = compute_seconds(flops / parts, 2 * moved, op.dtype, device)
        if rule.messages is not None:
            sent = rule.messages(local)
            forward_sent = self.timed(sent[0])
            backward_sent = self.timed(sent[1]) if op.has_backward else ()
        saves, saves_results = (rule.saves, rule.saves_results) if op.has_backward else ((), ())
        unsaved = [n for i, n in enumerate(sizes) if i not in saves and i not in op.parameters]
        unsaved += [n for i, n in enumerate(results) if i not in saves_results]
        gradients = [n for n, g in zip(sizes + results, op.operand_grads + op.result_grads, strict=True) if g]
        is_view = rule.alias is not None
        return OpPrice(
            operands=wanted,
            results=given,
            forward=forward,
            backward=backward,
            forward_sent=forward_sent,
            backward_sent=backward_sent,
            seconds=forward + backward + sum(s for _, s in forward_sent) + sum(s for _, s in backward_sent),
            working_forward=0 if is_view else sum(unsaved),
            working_backward=0 if is_view or not op.has_backward else sum(gradients),
            kept=-(-rule.saves_nbytes // parts) if op.has_backward else 0,
        )

    def optimizer_seconds(self, tensor: Tensor, storage: Layout) -> float:
        """One optimizer step over the rank's shard, padding included."""
        elements = self.local_nbytes(tensor, storage) / tensor.element_size
        return optimizer_step_seconds(self.config.optimizer, elements, tensor.element_size, self.cluster.device)

    def state_nbytes(self, tensor: Tensor, storage: Layout) -> int:
        """Optimizer state of the rank's shard."""
        elements = self.local_nbytes(tensor, storage) // tensor.element_size
        return elements * optimizer_state_nbytes(self.config.optimizer, tensor.element_size)


def total(timed: Timed) -> float:
    return sum(seconds for _, seconds in timed)
