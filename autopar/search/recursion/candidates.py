"""Which options has a cluster, one axis at a time? Made when asked for, so that no product over axes is ever listed."""

from dataclasses import dataclass, field

from autopar.search.graph.options import Option, Restriction, joint_choices, make_option
from autopar.search.recursion.neighbours import Neighbours

Joint = tuple[str, ...]
"""What each member of a cluster does on one axis."""
Joints = tuple[Joint, ...]
"""One `Joint` an axis."""


@dataclass(slots=True, kw_only=True)
class Candidates:
    """Options of the clusters of one program. On axes of equal size the same joint choices are offered."""

    neighbours: Neighbours
    restriction: Restriction = field(default_factory=Restriction)
    _joints: dict[tuple[int, int, int], tuple[Joint, ...]] = field(default_factory=dict)
    _options: dict[tuple[int, Joints], Option | None] = field(default_factory=dict)

    def on_axis(self, cluster: int, axis: int) -> tuple[Joint, ...]:
        """The joint choices of one axis."""
        pricer = self.neighbours.pricer
        named = axis if pricer.config.pins else -1  # pins name axes
        key = (cluster, pricer.mesh.shape[axis], named)
        if key not in self._joints:
            found = joint_choices(self.neighbours.clusters[cluster], axis, pricer, self.restriction.choice)
            self._joints[key] = tuple(found)
        return self._joints[key]

    def undivided(self, cluster: int) -> Joint:
        """What an axis does that is not decided yet: every member whole."""
        return ("invariant",) * len(self.neighbours.clusters[cluster].members)

    def option(self, cluster: int, joints: Joints) -> Option | None:
        """The option of these choices, None where the members' sizes do not allow it."""
        key = (cluster, joints)
        if key not in self._options:
            members = self.neighbours.clusters[cluster].members
            names = tuple(zip(*joints, strict=True))
            allowed = all(self.neighbours.pricer.target.is_allowed(op, n) for op, n in zip(members, names, strict=True))
            made = make_option(self.neighbours.clusters[cluster], names, self.neighbours.pricer) if allowed else None
            self._options[key] = made
        return self._options[key]
