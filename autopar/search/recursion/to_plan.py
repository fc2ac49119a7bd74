"""A decision of the double recursion as a plan."""

from autopar.lower.program import Program
from autopar.search.recursion.decide import Decider
from autopar.search.recursion.neighbours import Travel
from autopar.search.recursion.ways import SEARCHED_AXES, Path
from autopar.values.placement import REPLICATE, Layout
from autopar.values.redistribution import route
from autopar.values.stage_plan import StagePlan

ORIGIN = "double-recursive"


def plan_of(decider: Decider, program: Program) -> StagePlan:
    """The plan, every instance of a cluster as its first; ways that redistribution takes by itself are left out."""
    neighbours, decision = decider.neighbours, decider.decision
    pricer = neighbours.pricer
    choices: dict[str, tuple[str, ...]] = {}
    whole = Layout((REPLICATE,) * pricer.mesh.num_axes)
    layouts = {name: whole for name, tensor in program.tensors.items() if tensor.producer is None}
    lifetimes: dict[str, str] = {}
    routes: dict[str, tuple[tuple[Layout, ...], ...]] = {}
    for cluster, option in zip(neighbours.clusters, decision.options, strict=True):
        for positions in cluster.instances:
            choices.update((program.ops[p].name, n) for p, n in zip(positions, option.names, strict=True))
    for travel in neighbours.travels:
        given = decider.given(travel)
        wanted = [w for w in decider.wants(travel) if w is not None]
        paths = decider.homes.ways.paths(given, wanted, travel.tensor, travel.backward)
        if travel.maker is None:
            layouts.update(dict.fromkeys(travel.names, given))
        if travel.is_parameter:
            lifetimes.update(dict.fromkeys(travel.names, _lifetime(decider, travel, list(paths.values()))))
        unusual = [
            path for layout, path in paths.items() if path and not _is_usual(path, given, layout, travel, decider)
        ]
        if unusual:
            taken = tuple((given, *(step.target for step in path)) for path in unusual)
            routes.update(dict.fromkeys(travel.names, taken))
    return StagePlan(
        model=program.captured.name,
        fingerprint=program.captured.fingerprint,
        mesh=pricer.mesh,
        cluster=pricer.cluster.name,
        config=pricer.config,
        choices=choices,
        layouts=layouts,
        lifetimes=lifetimes,
        routes=routes,
        microbatches=program.microbatches,
        origin=ORIGIN,
    )


def _lifetime(decider: Decider, travel: Travel, paths: list[Path]) -> str:
    lifetime = decider.decision.homes[travel.number].lifetime
    once = lifetime == "step" or decider.neighbours.program.microbatches == 1
    if not any(step.forward == "all_gather" for path in paths for step in path):
        return "always" if once else "microbatch"
    return {"keep": "microbatch"}.get(lifetime, lifetime)


def _is_usual(path: Path, given: Layout, wanted: Layout, travel: Travel, decider: Decider) -> bool:
    """Whether `redistribution.route` takes the same steps; on many axes it is not asked, its search takes too long."""
    mesh, tensor = decider.neighbours.pricer.mesh, travel.tensor
    if mesh.num_axes > SEARCHED_AXES:
        return False
    return path == route(given, wanted, tensor.shape, tensor.element_size, mesh, tensor.requires_grad)
