"""What does one choice of one op cost, and one redistribution step? Cached prices for evaluation and search alike.

Compute is `cost_models.compute` on local shapes, the formulas of `autopar simulate`; views cost nothing. Forward moves
the bytes of its local operands and results, backward reads what autograd kept and the results' gradients, and writes
the operands'. Collectives are α–β on the links of their axes, slower by what a training step's contention takes of them
where that is fitted, apart for parameters and for activations, and longer by what ranks that computed wait for each
other where that was measured. A step is their sum; what runs beside compute is taken off afterwards (`costs.late`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from autopar.cluster import Cluster
from autopar.cost_models.collectives import Form, cheapest_in_step, least, shared, skew_seconds
from autopar.cost_models.compute import HOST, Rates, rates_of
from autopar.cost_models.links import axis_links
from autopar.cost_models.memory import optimizer_state_nbytes, optimizer_step_seconds
from autopar.mesh import Mesh
from autopar.placement import Layout, local_shape
from autopar.plan import TrainConfig
from autopar.redistribution import Message, Step, levels_of, messages
from autopar.rules.rule import Local, is_divisible, layouts, localized, splits
from autopar.search.costs.op_work import Layouts, OnAnyMesh, OpWork, Split, backward_seconds, forward_seconds
from autopar.search.costs.program import Op, Tensor

Timed = tuple[tuple[str, float, tuple[int, ...]], ...]
"""(collective, seconds, mesh axes)."""
REDUCTIONS, ELEMENT = ("all_reduce", "reduce_scatter"), 8
"""Of gradients; bytes of one element, at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPrice:
    """One op under one choice an axis. Bytes of one rank: `working` beside operands and results that are saved or are
    parameters, `spare` (`rules.spare`) among it, `kept` what autograd keeps beside saved operands and results.
    early: what of `forward_sent` begins before the first call."""

    operands: tuple[Layout, ...]
    results: tuple[Layout, ...]
    forward: float
    backward: float
    forward_sent: Timed
    backward_sent: Timed
    early: Timed
    seconds: float
    working_forward: int
    working_backward: int
    spare_forward: int
    spare_backward: int
    kept: int


@dataclass(kw_only=True)
class Pricer:
    """Prices of one program on one mesh of one cluster: signatures of another program mean other ops.

    in_buckets: parameters share messages, and each counts its `share` of a start, by the algorithm, and the levels,
    that then take least: no bucket costs its parameters less, and one of all that may be in it no more.
    shown: if not None, what runs beside compute (`costs.late`) counts less, so that the prices are a guide and prove
    nothing: of gradients' reductions that part; and sums of `ELEMENT` bytes or less, as of the loss and of the count
    of labels, have no start.
    loose: orders of the mesh's axes that make meshes like it, whose steps strategy graphs have too (`alike_meshes`).
    made: what strategy graphs of the program on the mesh share (`search.graph`); parameters: of any program on it;
    ops: what is known of the program's ops on any mesh of such devices.
    """

    mesh: Mesh
    cluster: Cluster
    config: TrainConfig
    in_buckets: bool = False
    shown: float | None = None
    loose: tuple[tuple[int, ...], ...] = ()
    ops: OnAnyMesh = field(default_factory=OnAnyMesh)
    made: dict[object, Any] = field(default_factory=dict, init=False)
    parameters: dict[object, Any] = field(default_factory=dict, init=False)
    _ops: dict[tuple[int, tuple[str, ...]], OpPrice] = field(default_factory=dict)
    _steps: dict[tuple[Step, tuple[int, ...], int, bool, float], tuple[Timed, Timed]] = field(default_factory=dict)
    _forms: dict[tuple[str, tuple[int, ...]], tuple[Form, ...]] = field(default_factory=dict)
    _sent: dict[tuple[str, tuple[int, ...], int, bool, float], tuple[float, str]] = field(default_factory=dict)
    _bytes: dict[tuple[tuple[int, ...], int, Layout], int] = field(default_factory=dict)
    _wholes: dict[tuple[Step, tuple[int, ...], int], tuple[int, int]] = field(default_factory=dict)
    _splits: dict[tuple[str, ...], Split] = field(default_factory=dict)
    _towards: dict[tuple[int, tuple[str, ...], frozenset[int]], float] = field(default_factory=dict)

    def for_another(self, ops: OnAnyMesh | None = None) -> "Pricer":
        """The same mesh for another program, of whose ops so much is known; what links take is known already."""
        other = replace(self, ops=ops or OnAnyMesh(), _ops={}, _towards={})
        other.parameters = self.parameters
        return other

    def within(self, memory_nbytes: float) -> "Pricer":
        """The same prices under another memory limit, which none depends on."""
        other = replace(self, config=replace(self.config, memory_nbytes=memory_nbytes))
        other.made, other.parameters = self.made, self.parameters
        return other

    def sharing(self, shown: float | None = None) -> "Pricer":
        """The same prices in buckets, where parameters count their shares of starts."""
        return self._with(True, shown)

    @cached_property
    def alone(self) -> "Pricer":
        """The same prices with the whole start of every collective, as those are of which a plan is made."""
        return self._with(False, None) if self.in_buckets else self

    def _with(self, in_buckets: bool, shown: float | None) -> "Pricer":
        ops = self._ops if shown == self.shown else {}
        return replace(self, in_buckets=in_buckets, shown=shown, _steps={}, _sent={}, _ops=ops)

    @cached_property
    def rates(self) -> Rates:
        return rates_of(self.cluster.device)

    def share(self, tensor: Tensor, lifetime: str) -> float:
        """What part of a start a tensor counts for each of its messages.

        A bucket of what is gathered for each use is of one block, any other of any parameters (`timeline.buckets`). The
        shares of all that may be in one are at most 1 together. A message of n bytes takes n times the least seconds of
        a byte and a start (`shared`) at least, which does not fall with n, so what shares of those of fewer bytes add
        up to is at most what the bucket takes.
        """
        return tensor.shares[lifetime != "use"] if self.in_buckets and tensor.kind == "parameter" else 1.0

    def gathers_again(self, times: int, readers: int) -> float:
        """How often backward gathers a copy again that is gathered for use, for one of so many readers, which needs it
        so many times: each time; in a bucket once, for all of them."""
        return min(times, 1) / readers if self.in_buckets else times

    def message(
        self, kind: str, axes: tuple[int, ...], nbytes: int, parameter: bool, share: float = 1.0
    ) -> tuple[float, str]:
        """Seconds of a collective along mesh axes, with so much of its start, and the algorithm that takes them whole.
        `parameter`: of what is sent."""
        key = (kind, axes, nbytes, parameter, share)
        found = self._sent.get(key)
        if found is None:
            forms = self._forms.get((kind, axes))
            if forms is None:
                forms = cheapest_in_step(kind, axis_links(self.cluster, self.mesh.shape, axes))
                self._forms[kind, axes] = forms
            part = self.rates.link(parameter)
            found = least(forms, nbytes, part)
            is_told = self.shown is not None and kind == "all_reduce" and nbytes <= ELEMENT
            share = share if parameter else 1.0 - is_told
            if share < 1.0:
                found = shared(forms, nbytes, part, share), found[1]
            if self.shown is not None and parameter and kind in REDUCTIONS:
                travel = nbytes * min(form.seconds_per_byte for form in forms) / part
                found = found[0] - (1 - self.shown) * travel, found[1]
            self._sent[key] = found
        return found

    def waiting(self, axes: tuple[int, ...]) -> float:
        """For how much of a message along mesh axes ranks wait for the last, because they computed before."""
        return skew_seconds(axis_links(self.cluster, self.mesh.shape, axes))

    def starting(self, axes: tuple[int, ...]) -> float:
        """Seconds in which a rank begins a message along mesh axes."""
        crossings = axis_links(self.cluster, self.mesh.shape, axes).crossings
        return max((crossing.level.launch for crossing in crossings), default=0.0)

    def slowest_level(self, axes: tuple[int, ...]) -> str:
        """The name of the slowest link level that a group along mesh axes crosses; "" of one rank."""
        crossings = axis_links(self.cluster, self.mesh.shape, axes).crossings
        return crossings[0].level.name if crossings else ""

    def timed(self, sent: tuple[Message, ...], parameter: bool = False, share: float = 1.0) -> Timed:
        return tuple((m.kind, self.message(m.kind, m.axes, m.nbytes, parameter, share)[0], m.axes) for m in sent)

    def step(
        self, step: Step, shape: tuple[int, ...], element_size: int, parameter: bool, share: float = 1.0
    ) -> tuple[Timed, Timed]:
        """Collectives of the forward and of the backward pass of one redistribution step, with so much of a start."""
        key = (step, shape, element_size, parameter, share)
        if key not in self._steps:
            ways = (step, *levels_of(step, self.mesh)) if parameter and self.in_buckets else (step,)
            found = []
            for way in ways:
                forward, backward = messages(
                    way, shape, element_size, self.mesh, self.sum_size(element_size, parameter)
                )
                found.append((self.timed(forward, parameter, share), self.timed(backward, parameter, share)))
            self._steps[key] = min(found, key=lambda pair: total(pair[0]) + total(pair[1]))
        return self._steps[key]

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
        key = (shape, element_size, layout)
        if key not in self._bytes:
            total = element_size
            for size in local_shape(shape, layout, self.mesh):
                total *= size
            self._bytes[key] = total
        return self._bytes[key]

    def local_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        return self.nbytes(tensor.shape, tensor.element_size, layout)

    def stored_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        """Bytes of a parameter as it is stored, and of its gradient."""
        return self.nbytes(tensor.shape, tensor.stored_size, layout)

    def cast_nbytes(self, tensor: Tensor, layout: Layout) -> int:
        """Bytes of the rank's part in the dtype that is computed on, 0 where that is what is stored."""
        return self.local_nbytes(tensor, layout) if tensor.is_cast else 0

    def is_allowed(self, op: Op, names: tuple[str, ...]) -> bool:
        """Whether the sizes of the op can be split so."""
        key = op.signature, self._split(names)
        found = self.ops.allowed.get(key)
        if found is None:
            found = self.ops.allowed[key] = is_divisible(op.rule, dict(key[1]))
        return found

    def op(self, op: Op, names: tuple[str, ...]) -> OpPrice:
        """The price of `op` under the choices called `names`, one a mesh axis."""
        key = (op.signature, names)
        price = self._ops.get(key)
        if price is None:
            price = self._ops[key] = self._price(op, names)
        return price

    def again(self, op: Op, price: OpPrice) -> float:
        """Seconds of a replay, without what it sends: forward's, and what having it run again takes."""
        return price.forward + (self.rates.replay_seconds if op.rule.alias is None else 0.0)

    def _price(self, op: Op, names: tuple[str, ...]) -> OpPrice:
        rule = op.rule
        wanted, given = self._layouts(op, names)
        forward_sent: Timed = ()
        backward_sent: Timed = ()
        early: Timed = ()
        if rule.messages is not None:
            sent = rule.messages(self._local(op, names, wanted, given))
            forward_sent = self.timed(sent[0])
            backward_sent = self.timed(sent[1]) if op.has_backward else ()
            early = self.timed(tuple(message for message in sent[0] if message.early))
        key = op.signature, self._split(names)
        work = self.ops.works.get(key)
        if work is None:
            work = self.ops.works[key] = self._work(op, names, wanted, given)
        return OpPrice(
            operands=wanted,
            results=given,
            forward_sent=forward_sent,
            backward_sent=backward_sent,
            early=early,
            seconds=work.forward + work.backward + total(forward_sent) + total(backward_sent),
            **work._asdict(),
        )

    def _split(self, names: tuple[str, ...]) -> Split:
        """By what splits the work, into how many parts: all that sizes on a rank depend on."""
        if names not in self._splits:
            parts: dict[str, int] = {}
            for name, size in zip(names, self.mesh.shape, strict=True):
                if splits(name):
                    parts[name] = parts.get(name, 1) * size
            self._splits[names] = tuple(sorted(parts.items()))
        return self._splits[names]

    def _layouts(self, op: Op, names: tuple[str, ...]) -> Layouts:
        key = op.signature, names
        found = self.ops.layouts.get(key)
        if found is None:
            chosen = tuple(op.choices[n] for n in names)
            found = self.ops.layouts[key] = layouts(chosen, op.operand_grads, op.result_grads)
        return found

    def _work(self, op: Op, names: tuple[str, ...], wanted: tuple[Layout, ...], given: tuple[Layout, ...]) -> OpWork:
        rule, local = op.rule, self._local(op, names, wanted, given)
        sizes, results = self._sizes(op, wanted, given)
        parts = local.parts()
        forward = backward = 0.0
        if rule.alias is None:
            forward = forward_seconds(op, sizes, results, local, self.rates)
            if op.has_backward:
                backward = backward_seconds(op, op.operand_grads, sizes, results, local, self.rates)
        saves, saves_results = self.saves(op) if op.has_backward else ((), ())
        unsaved = [n for i, n in enumerate(sizes) if i not in saves and i not in op.parameters]
        unsaved += [n for i, n in enumerate(results) if i not in saves_results]
        gradients = [n for i, n in enumerate(sizes) if op.operand_grads[i] and i not in op.handed]
        gradients += [n for n, g in zip(results, op.result_grads, strict=True) if g]
        if rule.spare is None:
            ahead, back = (round(part * max([*sizes, *results], default=0)) for part in op.spare)
        else:
            ahead, back = (n * op.result_sizes[0] for n in rule.spare(local.operand_shapes, local.result_shapes))
        kept = -(-rule.saves_nbytes // parts)
        if self._are_products(op):
            weights = -(-rule.products_nbytes // parts)  # scores and their softmax; the gradients of both
            kept, ahead, back = sum(sizes[:3]) + weights, ahead + weights, back + 2 * weights
        is_view = rule.alias is not None
        return OpWork(
            forward=forward,
            backward=backward,
            working_forward=0 if is_view else sum(unsaved) + ahead,
            working_backward=0 if is_view or not op.has_backward else sum(gradients) + back,
            spare_forward=ahead,
            spare_backward=back if op.has_backward else 0,
            kept=kept if op.has_backward else 0,
        )

    def saves(self, op: Op) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Operands and results that autograd keeps of an op with a backward pass; products keep copies instead."""
        return ((), ()) if self._are_products(op) else (op.rule.saves, op.rule.saves_results)

    def _are_products(self, op: Op) -> bool:
        """Whether the op is attention for which the device has no kernel."""
        return op.rule.products_on_host if self.rates.device.name == HOST else op.rule.products_on_gpu

    def backward_towards(self, op: Op, names: tuple[str, ...], slots: frozenset[int]) -> float:
        """Seconds of the part of an op's backward pass that gives these operands their gradients, run by itself.

        A product has one for each operand; any other op reads again what it keeps.
        """
        if op.rule.alias is not None:
            return 0.0
        key = (op.signature, names, slots)
        if key not in self._towards:
            grads = tuple(g and i in slots for i, g in enumerate(op.operand_grads))
            wanted, given = self._layouts(op, names)
            sizes, results = self._sizes(op, wanted, given)
            local = self._local(op, names, wanted, given)
            self._towards[key] = backward_seconds(op, grads, sizes, results, local, self.rates)
        return self._towards[key]

    def padded_seconds(self, op: Op, names: tuple[str, ...]) -> tuple[tuple[int, ...], float]:
        """Of matrix products: lengths of their rows on a rank, and seconds forward and backward if rows were padded."""
        assert op.rule.product is not None
        wanted, given = self._layouts(op, names)
        (sizes, results), local = self._sizes(op, wanted, given), self._local(op, names, wanted, given)
        rates = replace(self.rates, padded=True)
        seconds = forward_seconds(op, sizes, results, local, rates)
        if op.has_backward:
            seconds += backward_seconds(op, op.operand_grads, sizes, results, local, rates)
        return op.rule.product.sizes(local.operand_shapes, local.result_shapes)[2:], seconds

    def _local(self, op: Op, names: tuple[str, ...], wanted: tuple[Layout, ...], given: tuple[Layout, ...]) -> Local:
        """What a rank has of an op under its choices."""
        chosen = tuple(op.choices[n] for n in names)
        return localized(op.node, chosen, self.mesh, wanted, given, op.operand_shapes, op.result_shapes)

    def _sizes(self, op: Op, wanted: Sequence[Layout], given: Sequence[Layout]) -> tuple[list[int], list[int]]:
        """Bytes of a rank's operands and results."""
        sizes = [self.nbytes(*t) for t in zip(op.operand_shapes, op.operand_sizes, wanted, strict=True)]
        return sizes, [self.nbytes(*t) for t in zip(op.result_shapes, op.result_sizes, given, strict=True)]

    def optimizer_seconds(self, tensor: Tensor, storage: Layout, *, beside_split: bool = False) -> float:
        """One optimizer step over the rank's shard, padding and casts included; beside_split: of some other parameter
        the rank has a part."""
        elements = self.local_nbytes(tensor, storage) / tensor.element_size
        return self.update_seconds(tensor, elements, is_split=beside_split or elements < prod(tensor.shape))

    def is_split(self, tensor: Tensor, storage: Layout) -> bool:
        """Whether the rank has a part of a parameter alone."""
        return self.local_nbytes(tensor, storage) < prod(tensor.shape) * tensor.element_size

    def update_seconds(self, tensor: Tensor, elements: float, *, is_split: bool = False) -> float:
        """One optimizer step over so many elements of a parameter."""
        sizes = tensor.stored_size, tensor.element_size
        return optimizer_step_seconds(
            self.config.optimizer, elements, sizes[0], self.rates, sizes[1], is_split=is_split
        )

    def state_nbytes(self, tensor: Tensor, storage: Layout) -> int:
        """Optimizer state of the rank's shard."""
        elements = self.local_nbytes(tensor, storage) // tensor.element_size
        return elements * optimizer_state_nbytes(self.config.optimizer, tensor.stored_size)


def total(timed: Timed) -> float:
    return sum(seconds for _, seconds, _ in timed)
