"""What does one choice of one op cost, and one redistribution step? Cached prices for evaluation and search alike.

Compute is `cost_models.compute` on local shapes, the formulas of `autopar simulate`; views cost nothing. Forward moves
the bytes of its local operands and results, backward reads what autograd kept and the results' gradients, and writes
the operands'. Collectives are α–β on the links of their axes, slower by what a training step's contention takes of them
where that is fitted, apart for parameters and for activations, and longer by what ranks that computed wait for each
other where that was measured. A step is their sum; what runs beside compute is taken off afterwards
(`costs.overlapped_seconds`).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from math import prod
from typing import Any

from autopar.cost_models.collectives import Form, cheapest_in_step, least, shared, skew_seconds
from autopar.cost_models.compute import HOST, Rates, rates_of
from autopar.cost_models.links import axis_links
from autopar.cost_models.memory import optimizer_step_seconds
from autopar.lower.program import Op, Tensor
from autopar.lower.target import LocalOp, OnAnyMesh, Target
from autopar.search.costs.op_work import backward_seconds, forward_seconds
from autopar.values.cluster import Cluster
from autopar.values.mesh import Mesh
from autopar.values.placement import Layout
from autopar.values.redistribution import Message, Step, levels_of, messages
from autopar.values.train_config import TrainConfig

Timed = tuple[tuple[str, float, tuple[int, ...]], ...]
"""(collective, seconds, mesh axes)."""
REDUCTIONS, ELEMENT = ("all_reduce", "reduce_scatter"), 8
"""Of gradients; bytes of one element, at most."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OpPrice:
    """Seconds of one op under one choice an axis, beside what a rank has of it (`local`).

    early: what of `forward_sent` begins before the first call.
    """

    local: LocalOp
    forward: float
    backward: float
    forward_sent: Timed
    backward_sent: Timed
    early: Timed
    seconds: float

    @property
    def operands(self) -> tuple[Layout, ...]:
        return self.local.operands

    @property
    def results(self) -> tuple[Layout, ...]:
        return self.local.results


@dataclass(kw_only=True)
class Pricer:
    """Prices of one program on one mesh of one cluster: signatures of another program mean other ops (`make_pricer`).

    target: what a rank has of ops and tensors there.

    in_buckets: parameters share messages, and each counts its `share` of a start, by the algorithm, and the levels,
    that then take least: no bucket costs its parameters less, and one of all that may be in it no more.
    shown: if not None, what runs beside compute (`costs.overlapped_seconds`) counts less, so that the prices are a
    guide and prove nothing: of gradients' reductions that part; and sums of `ELEMENT` bytes or less, as of the loss and
    of the count of labels, have no start.
    loose: orders of the mesh's axes that make meshes like it, whose steps strategy graphs have too (`alike_meshes`).
    made: what strategy graphs of the program on the mesh share (`search.graph`); parameters: of any program on it.
    """

    target: Target
    cluster: Cluster
    in_buckets: bool = False
    shown: float | None = None
    loose: tuple[tuple[int, ...], ...] = ()
    made: dict[object, Any] = field(default_factory=dict, init=False)
    parameters: dict[object, Any] = field(default_factory=dict, init=False)
    _ops: dict[tuple[int, tuple[str, ...]], OpPrice] = field(default_factory=dict)
    _steps: dict[tuple[Step, tuple[int, ...], int, bool, float], tuple[Timed, Timed]] = field(default_factory=dict)
    _forms: dict[tuple[str, tuple[int, ...]], tuple[Form, ...]] = field(default_factory=dict)
    _sent: dict[tuple[str, tuple[int, ...], int, bool, float], tuple[float, str]] = field(default_factory=dict)
    _towards: dict[tuple[int, tuple[str, ...], frozenset[int]], float] = field(default_factory=dict)

    @property
    def mesh(self) -> Mesh:
        return self.target.mesh

    @property
    def config(self) -> TrainConfig:
        return self.target.config

    def for_another(self, ops: OnAnyMesh | None = None) -> "Pricer":
        """The same mesh for another program, of whose ops so much is known; what links take is known already."""
        other = replace(self, target=self.target.for_another(ops or OnAnyMesh()), _ops={}, _towards={})
        other.parameters = self.parameters
        return other

    def within(self, memory_nbytes: float) -> "Pricer":
        """The same prices under another memory limit, which none depends on."""
        other = replace(self, target=self.target.within(replace(self.config, memory_nbytes=memory_nbytes)))
        other.made, other.parameters = self.made, self.parameters
        return other

    def sharing(self, shown: float) -> "Pricer":
        """The same prices in buckets where what runs beside compute counts less."""
        return replace(self, in_buckets=True, shown=shown, _steps={}, _sent={}, _ops={})

    @cached_property
    def shared(self) -> "Pricer":
        """The same prices in buckets, where parameters count their shares of starts."""
        return self if self.in_buckets and self.shown is None else self._with(True)

    @cached_property
    def alone(self) -> "Pricer":
        """The same prices with the whole start of every collective, as those are of which a plan is made."""
        return self._with(False) if self.in_buckets else self

    def _with(self, in_buckets: bool) -> "Pricer":
        """Of ops, and of what is sent between them, the prices are the same in buckets and alone."""
        if self.shown is not None:
            return replace(self, in_buckets=in_buckets, shown=None, _steps={}, _sent={}, _ops={})
        other = replace(self, in_buckets=in_buckets, _steps={})
        other.made = self.made
        return other

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
                    way, shape, element_size, self.mesh, self.target.sum_size(element_size, parameter)
                )
                found.append((self.timed(forward, parameter, share), self.timed(backward, parameter, share)))
            self._steps[key] = min(found, key=lambda pair: total(pair[0]) + total(pair[1]))
        return self._steps[key]

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
        local = self.target.op(op, names)
        forward_sent, backward_sent = self.timed(local.forward_messages), self.timed(local.backward_messages)
        key = op.signature, self.target.split(names)
        known = self.target.ops.seconds
        if key not in known:
            known[key] = self._seconds(op, names, op.operand_grads, self.rates)
        forward, backward = known[key]
        return OpPrice(
            local=local,
            forward=forward,
            backward=backward,
            forward_sent=forward_sent,
            backward_sent=backward_sent,
            early=self.timed(tuple(message for message in local.forward_messages if message.early)),
            seconds=forward + backward + total(forward_sent) + total(backward_sent),
        )

    def _seconds(self, op: Op, names: tuple[str, ...], grads: tuple[bool, ...], rates: Rates) -> tuple[float, float]:
        """What one rank computes forward, and backward towards operands with `grads`; nothing of a view."""
        if op.rule.alias is not None:
            return 0.0, 0.0
        local, (operands, results) = self.target.local(op, names), self.target.sides(op, names)
        forward = forward_seconds(op, operands, results, local, rates)
        return forward, backward_seconds(op, grads, operands, results, local, rates) if op.has_backward else 0.0

    def backward_towards(self, op: Op, names: tuple[str, ...], slots: frozenset[int]) -> float:
        """Seconds of the part of an op's backward pass that gives these operands their gradients, run by itself.

        A product has one for each operand; any other op reads again what it keeps.
        """
        key = (op.signature, names, slots)
        if key not in self._towards:
            grads = tuple(g and i in slots for i, g in enumerate(op.operand_grads))
            self._towards[key] = self._seconds(op, names, grads, self.rates)[1]
        return self._towards[key]

    def padded_seconds(self, op: Op, names: tuple[str, ...]) -> tuple[tuple[int, ...], float]:
        """Of matrix products: lengths of their rows on a rank, and seconds forward and backward if rows were padded."""
        assert op.rule.product is not None
        local = self.target.local(op, names)
        seconds = self._seconds(op, names, op.operand_grads, replace(self.rates, padded=True))
        return op.rule.product.sizes(local.operand_shapes, local.result_shapes)[2:], sum(seconds)

    def optimizer_seconds(self, tensor: Tensor, storage: Layout, *, beside_split: bool = False) -> float:
        """One optimizer step over the rank's shard, padding and casts included; beside_split: of some other parameter
        the rank has a part."""
        elements = self.target.local_nbytes(tensor, storage) / tensor.element_size
        return self.update_seconds(tensor, elements, is_split=beside_split or elements < prod(tensor.shape))

    def update_seconds(self, tensor: Tensor, elements: float, *, is_split: bool = False) -> float:
        """One optimizer step over so many elements of a parameter."""
        sizes = tensor.stored_size, tensor.element_size
        return optimizer_step_seconds(
            self.config.optimizer, elements, sizes[0], self.rates, sizes[1], is_split=is_split
        )


def make_pricer(
    *,
    mesh: Mesh,
    cluster: Cluster,
    config: TrainConfig,
    in_buckets: bool = False,
    loose: tuple[tuple[int, ...], ...] = (),
) -> Pricer:
    """Prices on a mesh of a cluster."""
    on_host = rates_of(cluster.device).device.name == HOST
    target = Target(mesh=mesh, config=config, on_host=on_host)
    return Pricer(target=target, cluster=cluster, in_buckets=in_buckets, loose=loose)


def total(timed: Timed) -> float:
    return sum(seconds for _, seconds, _ in timed)
