"""Which options has a cluster? Per mesh axis the consistent choices of its members, then all combinations of axes.

Left out of the space, for every op:
- an operand that is a trainable parameter, or needs no gradient while the op does, as summands (but for added biases);
- of several joint choices with the same outer placements on an axis, all but the cheapest on that axis alone;
- on axes of size 1, anything but Invariant.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from autopar.errors import InfeasibleError
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
    together: of an op with its choices on all axes, what is allowed beside.
    handed: of inputs by name, layouts in which they are handed over; they are redistributed from there.
    lived: of parameters by name, lifetimes as plans call them (`lower.pinned.lives_as_pinned`).
    again, keeps: ops that are run again in backward, and ops that are not, nor copies of what they made.
    """

    choice: Allowed = lambda op, axis, name: True
    otherwise: Allowed | None = None
    apart: frozenset[str] = frozenset()
    storage: Callable[[Tensor, Layout], bool] = lambda tensor, layout: True
    lifetimes: tuple[str, ...] = ("step", "keep", "use")
    together: Callable[[Op, tuple[str, ...]], bool] | None = None
    handed: Mapping[str, tuple[Layout, ...]] = field(default_factory=dict)
    lived: Mapping[str, frozenset[object]] = field(default_factory=dict)
    again: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
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


def cluster_options(
    cluster: OpCluster, pricer: Pricer, allowed: Allowed, together: Callable[[Op, tuple[str, ...]], bool] | None = None
) -> list[Option]:
    """All options: combinations of the axes' joint choices that the members' sizes, and `together`, allow."""
    axes = [joint_choices(cluster, axis, pricer, allowed) for axis in range(pricer.mesh.num_axes)]
    out = []
    for combination in itertools.product(*axes):
        names = tuple(zip(*combination, strict=True))
        members = list(zip(cluster.members, names, strict=True))
        is_allowed = together is None or all(together(op, n) for op, n in members)
        if is_allowed and all(pricer.target.is_allowed(op, n) for op, n in members):
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


class NoOptionError(InfeasibleError):
    """A cluster has no option in the part of the space that is asked for."""

    def __init__(self, cluster: OpCluster) -> None:
        root = cluster.root
        super().__init__(f"{root.name} ({root.module}) has no choice in the part of the space that is asked for")
        self.cluster = cluster


def options_within(cluster: OpCluster, pricer: Pricer, within: Restriction) -> list[Option]:
    """A cluster's, priced once for all graphs of the program on the mesh.

    Raises:
        NoOptionError: if there is none.
    """
    key, made = (cluster, within.choice, within.together), pricer.made
    if key not in made:
        allowed = within.choice, within.otherwise
        offered = (cluster_options(cluster, pricer, a, within.together) for a in allowed if a is not None)
        made[key] = next((options for options in offered if options), [])
    found: list[Option] = made[key]
    if not found:
        raise NoOptionError(cluster)
    return found
