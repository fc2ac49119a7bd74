"""Who decides, and which tensors join them? The clusters of a program and every tensor that travels between them.

The same nodes as those of the strategy graph, but without tables: a recursion over the axes of a mesh never lists the
combinations of all axes, whose number grows exponentially with them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autopar.lower.program import Program, Tensor
from autopar.lower.redistributions import SINK
from autopar.search.costs.folding import Folding, Signature, fold_program
from autopar.search.costs.pricing import Pricer
from autopar.search.graph.clusters import OpCluster, make_clusters
from autopar.values.placement import INVARIANT, REPLICATE, Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Use:
    """One way a kind of tensor is read: by operand `slot` of a cluster's member, or (cluster None) by the output.

    savers: ops an instance of the tensor that keep it. positions[i]: the ops that read tensor i of its kind.
    """

    cluster: int | None
    member: int
    slot: int
    savers: int
    in_backward: bool
    positions: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Travel:
    """Tensors that travel alike, `names`, of which `tensor` is the first; `maker`: cluster, None for placeholders.

    backward: a gradient travels back. keeps_given: the op that makes it saves it too. regatherable: of a parameter, no
    view of it leaves a cluster (whose readers would gather it again).
    """

    number: int
    names: tuple[str, ...]
    tensor: Tensor
    maker: int | None
    uses: tuple[Use, ...]
    backward: bool
    keeps_given: bool
    regatherable: bool

    @property
    def is_parameter(self) -> bool:
        return self.tensor.kind == "parameter"


@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbours:
    """Clusters and travels of one program on one mesh; `wanted_by_output[whether it is the loss]`."""

    program: Program
    pricer: Pricer
    clusters: tuple[OpCluster, ...]
    travels: tuple[Travel, ...]

    @cached_property
    def touching(self) -> tuple[tuple[Travel, ...], ...]:
        """For each cluster the tensors that it makes or reads."""
        found: list[dict[int, Travel]] = [{} for _ in self.clusters]
        for travel in self.travels:
            for cluster in (travel.maker, *(use.cluster for use in travel.uses)):
                if cluster is not None:
                    found[cluster][travel.number] = travel
        return tuple(tuple(f.values()) for f in found)

    @cached_property
    def adjacent(self) -> tuple[frozenset[int], ...]:
        """For each cluster itself and those that some tensor joins to it."""
        ends = [{t.maker, *(use.cluster for use in t.uses)} for t in self.travels]
        joined = [set().union({i}, *(ends[t.number] for t in travels)) for i, travels in enumerate(self.touching)]
        return tuple(frozenset(c for c in cluster if c is not None) for cluster in joined)

    def output_wants(self, travel: Travel) -> Layout:
        """The layout that the graph's output asks for: the loss Invariant, new buffers whole."""
        whole = INVARIANT if travel.names[0] == self.program.loss else REPLICATE
        return Layout((whole,) * self.pricer.mesh.num_axes)


def find_neighbours(
    program: Program, pricer: Pricer, *, coarse: bool, fold: bool = True, apart: frozenset[str] = frozenset()
) -> Neighbours:
    """The clusters (`clusters.make_clusters`) and the tensors between them; equal blocks are one."""
    folding = fold_program(program, fold=fold, pins=pricer.config.pins)
    clusters = make_clusters(program, folding, coarse=coarse, apart=apart)
    place = {
        folding.class_of[p]: (number, member)
        for number, cluster in enumerate(clusters)
        for member, p in enumerate(cluster.instances[0])
    }
    travels: list[Travel] = []
    for names, signature in zip(folding.travellers, folding.signatures, strict=True):
        tensor = program.tensors[names[0]]
        maker = None
        if tensor.producer is not None:
            maker, member = place[folding.class_of[tensor.producer]]
            if member != len(clusters[maker].members) - 1:
                continue
        travels.append(_travel(len(travels), names, signature, maker, program, folding, clusters, place))
    return Neighbours(program=program, pricer=pricer, clusters=clusters, travels=tuple(travels))


def _travel(
    number: int,
    names: tuple[str, ...],
    signature: Signature,
    maker: int | None,
    program: Program,
    folding: Folding,
    clusters: Sequence[OpCluster],
    place: dict[int, tuple[int, int]],
) -> Travel:
    tensor = program.tensors[names[0]]
    uses = tuple(_use(names, c, slot, program, folding, clusters, place) for c, slot in sorted(signature))
    root = None if maker is None else clusters[maker].root
    return Travel(
        number=number,
        names=names,
        tensor=tensor,
        maker=maker,
        uses=uses,
        backward=tensor.requires_grad and any(u.in_backward for u in uses),
        keeps_given=root is not None and root.has_backward and tensor.index in root.rule.saves_results,
        regatherable=tensor.kind == "parameter"
        and not any(
            _leaves_as_view(p, program, folding, clusters, place) for name in names for p, _ in program.readers[name]
        ),
    )


def _use(
    names: tuple[str, ...],
    number: int,
    slot: int,
    program: Program,
    folding: Folding,
    clusters: Sequence[OpCluster],
    place: dict[int, tuple[int, int]],
) -> Use:
    if number == SINK:
        is_loss = names[0] == program.loss
        return Use(cluster=None, member=0, slot=0, savers=0, in_backward=is_loss, positions=((),) * len(names))
    node, member = place[number]
    cluster = clusters[node]
    positions = tuple(
        tuple(p for p, s in program.readers[name] if s == slot and folding.class_of[p] == number) for name in names
    )
    return Use(
        cluster=node,
        member=member,
        slot=slot,
        savers=cluster.saved_outer.get((member, slot), 0) * len(positions[0]),
        in_backward=cluster.members[member].has_backward,
        positions=positions,
    )


def _leaves_as_view(
    position: int,
    program: Program,
    folding: Folding,
    clusters: Sequence[OpCluster],
    place: dict[int, tuple[int, int]],
) -> bool:
    """Whether the op is a view that other clusters read, or is read by one inside its cluster."""
    op = program.ops[position]
    if op.rule.alias is None:
        return False
    node, member = place[folding.class_of[position]]
    if member == len(clusters[node].members) - 1:
        return True
    readers = (p for r in op.results if r is not None for p, _ in program.readers[r])
    return any(_leaves_as_view(p, program, folding, clusters, place) for p in readers)
