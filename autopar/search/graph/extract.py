"""A solution of the strategy graph as a plan: every instance of a class as its class was decided."""

import itertools

from autopar.search.graph.problem import ArcSteps, Problem
from autopar.search.graph.strategy_graph import Solution
from autopar.values.cluster import Cluster
from autopar.values.placement import REPLICATE, Layout
from autopar.values.redistribution import Step, route
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

Path = tuple[Layout, ...]


def extract(problem: Problem, solution: Solution, cluster: Cluster, config: TrainConfig, origin: str) -> StagePlan:
    """The plan that costs what the solution costs; ways that redistribution takes by itself are not written down."""
    program, pricer = problem.program, problem.pricer
    choices: dict[str, tuple[str, ...]] = {}
    whole = Layout((REPLICATE,) * pricer.mesh.num_axes)
    layouts = {name: whole for name, tensor in program.tensors.items() if tensor.producer is None}
    lifetimes: dict[str, str] = {}
    gathered: set[str] = set()
    recompute: set[str] = set()
    remade: dict[str, tuple[Layout, ...]] = {}
    for node, options in problem.options.items():
        number = int(solution.choice[node])
        option = options[number]
        for positions in problem.clusters[node].instances:
            choices.update((program.ops[p].name, n) for p, n in zip(positions, option.names, strict=True))
            if number >= problem.num_kept.get(node, len(options)):
                recompute.update(program.ops[p].name for p in positions)
    for node, (names, given) in problem.inputs.items():
        layouts.update(dict.fromkeys(names, given[int(solution.choice[node])]))
    for node, (names, space) in problem.parameters.items():
        storage, lifetime = space.options[int(solution.choice[node])]
        layouts.update(dict.fromkeys(names, storage))
        lifetimes.update(dict.fromkeys(names, lifetime))
    routes: dict[str, tuple[Path, ...]] = {}
    for number, (names, vertices, steps) in enumerate(problem.travels):
        group = problem.groups[number]
        used = solution.arcs[number].tolist()
        start = int(group.gives[solution.choice[group.producer]])
        source = vertices[start]
        assert source is not None
        tensor = program.tensors[names[0]]
        if tensor.kind in ("input", "buffer", "constant"):
            continue
        if any(step.forward == "all_gather" for arc in used for step in steps[arc]):
            gathered.update(names)
        if number in problem.replayed_arcs:
            again = {step.target for arc in used if problem.replayed_arcs[number][arc] for step in steps[arc]}
            if again:
                remade.update(dict.fromkeys(names, tuple(sorted(again, key=str))))
        paths: dict[Layout, Path] = {}
        for walked in _walks(group.arc_source.tolist(), group.arc_target.tolist(), steps, used, start):
            if not walked:
                continue
            path = (source, *(step.target for step in walked))
            if path[-1] in paths:
                continue
            usual = route(source, path[-1], tensor.shape, tensor.element_size, pricer.mesh, tensor.requires_grad)
            if path != (source, *(step.target for step in usual)):
                paths[path[-1]] = path
        if paths:
            routes.update(dict.fromkeys(names, tuple(paths.values())))
    return StagePlan(
        model=program.captured.name,
        fingerprint=program.captured.fingerprint,
        mesh=pricer.mesh,
        cluster=cluster.name,
        config=config,
        choices=choices,
        layouts=layouts,
        lifetimes={n: _lifetime(v, n in gathered, program.microbatches) for n, v in lifetimes.items()},
        routes=routes,
        microbatches=program.microbatches,
        recompute=frozenset(recompute),
        remade=remade,
        origin=origin,
    )


def _lifetime(chosen: str, gathered: bool, microbatches: int) -> str:
    """What a parameter's option is called; `always` is paid once a step, so of several only what was chosen so."""
    if gathered:
        return {"keep": "microbatch"}.get(chosen, chosen)
    return "always" if chosen == "step" or microbatches == 1 else "microbatch"


def _walks(
    sources: list[int], targets: list[int], steps: ArcSteps | tuple[tuple[Step, ...], ...], used: list[int], start: int
) -> list[tuple[Step, ...]]:
    """For every vertex reached, the steps that lead there."""
    walks: dict[int, tuple[Step, ...]] = {start: ()}
    remaining = list(used)
    while (arc := next((a for a in remaining if sources[a] in walks), None)) is not None:
        remaining.remove(arc)
        if targets[arc] not in walks:
            walks[targets[arc]] = tuple(itertools.chain(walks[sources[arc]], steps[arc]))
    return list(walks.values())
