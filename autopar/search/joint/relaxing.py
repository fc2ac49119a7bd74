"""What does a mesh take at least, memory aside and within it? The joint search's bounds."""

import math
from dataclasses import dataclass, field, replace

from autopar.lower.program import Program
from autopar.lower.target import OnAnyMesh
from autopar.search.alike_meshes import loose_orders
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.exact.limited_bound import least_within
from autopar.search.exact.relaxation import least_seconds
from autopar.search.graph.build import build
from autopar.search.graph.build_recompute import RecomputeBuilder
from autopar.search.graph.moments import Counting, Share
from autopar.search.known.baselines import memory_limit
from autopar.search.meshes import Arrangement
from autopar.search.search_options import SearchAim
from autopar.values.train_config import TrainConfig

RECENT = 8


def relaxed_seconds(program: Program, pricer: Pricer, times: int, fold: bool, cutoff: float = math.inf) -> float:
    """The least that `times` micro-batches and what is paid once take on the pricer's mesh, memory aside (a bound); no
    better than the cutoff."""
    accumulation, known = program.captured.accumulation, program.made
    if accumulation is not None and times != accumulation.microbatches:
        again = replace(accumulation, microbatches=times)
        program = replace(program, captured=program.captured.accumulated(again))
        program.made.update(known)
    graph = build(program, pricer, limit=None, fold=fold).graph
    known.update(program.made)
    return least_seconds(graph, cutoff)


def seconds_within(
    program: Program,
    pricer: Pricer,
    share: Share | None,
    fold: bool,
    asked: SearchAim,
    seconds: float,
    part: float = 1.0,
) -> float:
    """The least that a step of the whole model takes within the memory of a device, or of the pipeline rank whose
    `share` it is, recompute allowed (a bound); infinite where nothing fits.

    part: of the bytes of what lies between ops."""
    limit, counted = memory_limit(pricer.cluster, pricer.config), Counting(share=share, part=part)
    graph = build(program, pricer, limit=limit, fold=fold, builder=RecomputeBuilder, counted=counted).graph
    return least_within(graph, cutoff=asked.cutoff, seconds=seconds, prices=asked.prices)


@dataclass(slots=True)
class Pricers:
    """Prices by mesh and number of micro-batches; what ops and strategy graphs take space for is known of the `RECENT`
    last alone, links and parameters of each mesh, ops of each number on any mesh.

    in_buckets: without stages; those count every collective alone.
    """

    config: TrainConfig
    in_buckets: bool = False
    _links: dict[tuple[Arrangement, bool], Pricer] = field(default_factory=dict)
    _recent: dict[tuple[Arrangement, int, bool], Pricer] = field(default_factory=dict)
    _ops: dict[int, OnAnyMesh] = field(default_factory=dict)

    def of(self, arrangement: Arrangement, microbatches: int, *, loose: bool = False) -> Pricer:
        """loose: of bounds that hold for all meshes like it."""
        orders = loose_orders(arrangement) if loose else ()
        kind = (arrangement, bool(orders))
        if kind not in self._links:
            self._links[kind] = make_pricer(
                mesh=arrangement.mesh,
                cluster=arrangement.cluster,
                config=self.config,
                in_buckets=self.in_buckets and arrangement.pipeline == 1,
                loose=orders,
            )
        key = (arrangement, microbatches, bool(orders))
        ops = self._ops.setdefault(microbatches, OnAnyMesh())
        found = self._recent.pop(key, None) or self._links[kind].for_another(ops)
        self._recent[key] = found
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return found
