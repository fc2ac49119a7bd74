"""Which options has a cluster? Per mesh axis the consistent choices of its members, then all combinations of axes.

Left out of the space, for every op:
- an operand that is a trainable parameter, or needs no gradient while the op does, as summands (but for added biases);
- of several joint choices with the same outer placements on an axis, all but the cheapest on that axis alone;
- on axes of size 1, anything but Invariant.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autopar.lower.program import Op, Tensor
from autopar.search.costs.pricing import Pricer, total
from autopar.search.graph.clusters import OpCluster
from autopar.values.placement import INVARIANT, PARTIAL, REPLICATE, Layout, Placement

Allowed = Callable[[Op, int, str], bool]
"""(op, mesh axis, name of choice) -> whether it is in the space."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restriction:
    """A part of the space; the whole of it by default.

    otherwise: in place of `choice` for a cluster that has no option by it. apart: ops decided by themselves.
    """

    choice: Allowed = lambda op, axis, name: True
    otherwise: Allowed | None = None
    apart: frozenset[str] = frozenset()
    storage: Callable[[Tensor, Layout], bool] = lambda tensor, layout: True
    lifetimes: tuple[str, ...] = ("step", "keep", "use")
    recompute: Callable[[Op], bool] | None = None
    """Ops that are run again where that is possible, all others not; None where the search decides."""


EVERYTHING = Restriction()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Option:
    """`names[member]`: its choices; `wants[member]`: layouts of its operands; `gives`: of the root's results.

    forward, backward: seconds of one instance, messages of its bodies included. kept: bytes a rank that autograd keeps
    inside. working: most bytes beside, by pass.
    """

    names: tuple[tuple[str, ...], ...]
    wants: tuple[tuple[Layout, ...], ...]
    gives: tuple[Layout, ...]
    forward: float
    backward: float
    kept: int
    working_forward: int
    working_backward: int

    @property
    def seconds(self) -> float:
        return self.forward + self.backward

    def paid(self, times: tuple[float, float]) -> float:
        """Seconds of so many passages forward and back."""
        return self.forward * times[0] + self.backward * times[1]


def axis_choices(op: Op, axis: int, pricer: Pricer, allowed: Allowed) -> list[str]:
    """Choices of one op on one axis."""
    if pricer.mesh.shape[axis] == 1:
        return ["invariant"]
    seen: set[object] = set()
    out = []
    needs = any(op.result_grads)
    for name, choice in op.choices.items():
        if not allowed(op, axis, name):
            continue
        if name.startswith("partial") and any(
            p == PARTIAL and (i in op.parameters or (needs and not op.operand_grads[i]))
            for i, p in enumerate(choice.operands)
        ):
            continue
        effect = (_plain(choice.operands, op.operand_grads), _plain(choice.results, op.result_grads))
        split = name in op.rule.factors
        if (effect, split) in seen or not pricer.target.is_allowed(op, _alone(name, axis, pricer)):
            continue
        seen.add((effect, split))
        out.append(name)
    return out


def _plain(placements: tuple[Placement, ...], grads: tuple[bool, ...]) -> tuple[Placement, ...]:
    pairs = zip(placements, grads, strict=True)
    return tuple(REPLICATE if p == INVARIANT and not g else p for p, g in pairs)


def _alone(name: str, axis: int, pricer: Pricer) -> tuple[str, ...]:
    return tuple(name if a == axis else "invariant" for a in range(pricer.mesh.num_axes))


def joint_choices(cluster: OpCluster, axis: int, pricer: Pricer, allowed: Allowed) -> list[tuple[str, ...]]:
    """Consistent choices of all members on one axis: inner tensors are wanted as they are given."""
    members = cluster.members
    offered = [axis_choices(op, axis, pricer, allowed) for op in members]
    cheapest: dict[object, tuple[float, tuple[str, ...]]] = {}
    for names in _consistent(cluster, offered, len(members) - 1, {}, ()):
        outer: list[Placement] = []
        for op, name in zip(members, names, strict=True):
            placements = _plain(op.choices[name].operands, op.operand_grads)
            outer += [p for p, tensor in zip(placements, op.operands, strict=True) if tensor not in cluster.inner]
        root = members[-1]
        key = (tuple(outer), _plain(root.choices[names[-1]].results, root.result_grads))
        seconds = sum(pricer.op(op, _alone(n, axis, pricer)).seconds for op, n in zip(members, names, strict=True))
        if key not in cheapest or seconds < cheapest[key][0]:
            cheapest[key] = (seconds, names)
    return [names for _, names in cheapest.values()]


def _consistent(
    cluster: OpCluster, offered: list[list[str]], i: int, wanted: dict[str, Placement], chosen: tuple[str, ...]
) -> Iterator[tuple[str, ...]]:
    """Depth first from the root backwards; `wanted` says how inner tensors are read by the members already chosen."""
    if i < 0:
        yield chosen
        return
    op = cluster.members[i]
    for name in offered[i]:
        choice = op.choices[name]
        results = _plain(choice.results, op.result_grads)
        if any(r in wanted and wanted[r] != p for r, p in zip(op.results, results, strict=True) if r is not None):
            continue
        after = dict(wanted)
        placements = _plain(choice.operands, op.operand_grads)
        if all(
            tensor not in cluster.inner or after.setdefault(tensor, p) == p
            for tensor, p in zip(op.operands, placements, strict=True)
        ):
            yield from _consistent(cluster, offered, i - 1, after, (name, *chosen))


def cluster_options(cluster: OpCluster, pricer: Pricer, allowed: Allowed) -> list[Option]:
    """All options: combinations of the axes' joint choices that the members' sizes allow."""
    axes = [joint_choices(cluster, axis, pricer, allowed) for axis in range(pricer.mesh.num_axes)]
    out = []
    for combination in itertools.product(*axes):
        names = tuple(zip(*combination, strict=True))
        if all(pricer.target.is_allowed(op, n) for op, n in zip(cluster.members, names, strict=True)):
            out.append(make_option(cluster, names, pricer))
    return out


def make_option(cluster: OpCluster, names: tuple[tuple[str, ...], ...], pricer: Pricer) -> Option:
    """The members' choices, one an axis each, with what they cost together."""
    members = cluster.members
    prices = [pricer.op(op, n) for op, n in zip(members, names, strict=True)]
    kept = sum(price.local.sizes.kept for price in prices)
    forward = sum(price.forward + total(price.forward_sent) for price in prices)
    for member, result in cluster.saved_inner:
        op = members[member]
        kept += pricer.target.nbytes(op.result_shapes[result], op.result_sizes[result], prices[member].results[result])
    return Option(
        names=names,
        wants=tuple(price.operands for price in prices),
        gives=prices[-1].results,
        forward=forward,
        backward=sum(price.seconds for price in prices) - forward,
        kept=kept,
        working_forward=max(price.local.sizes.working_forward for price in prices),
        working_backward=max(price.local.sizes.working_backward for price in prices),
    )
