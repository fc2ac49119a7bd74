"""What would today's recipes with a pipeline cost here? `megatron:tp=8,pp=4,vpp=2,mbs=1` as a plan in stages.

The whole model is planned as the recipe says on the mesh of one pipeline rank, then cut at blocks where the slowest
stage is fastest (`search.stages`). What the recipe leaves open is decided for the fastest step, and where a rank then
holds more than its limit, again for less memory of the whole model.
"""

from dataclasses import replace

from autopar.errors import ArgumentError, InfeasibleError
from autopar.lower.program import Program, make_program
from autopar.search.costs.pricing import Pricer, make_pricer
from autopar.search.known.baselines import baseline_plan, make_baseline, memory_limit
from autopar.search.known.named_configuration import NamedConfiguration, parse_configuration
from autopar.search.pipeline_parts import part_of
from autopar.search.staged.stages import choose_cuts, priced, staged
from autopar.values.cluster import Cluster
from autopar.values.gigabytes import gigabytes, least_gigabytes
from autopar.values.graph import CapturedModel
from autopar.values.mesh import Mesh
from autopar.values.plan import Plan, one_stage
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig

TRIES = 4
"""How often the whole model is planned with less memory until its stages fit."""
LESS = 0.98


def make_configuration(text: str, captured: CapturedModel, cluster: Cluster, mesh: Mesh, config: TrainConfig) -> Plan:
    """The plan of a named configuration, in stages if it has several pipeline ranks; `mesh` is that of each.

    Raises:
        ArgumentError: for an unknown name, key or value, or a schedule that does not run so many micro-batches.
        InfeasibleError: if it does not apply to this model and mesh, has more stages than the model has blocks, or
            does not fit the memory.
    """
    said = parse_configuration(text)
    if said.pp == 1:
        return one_stage(make_baseline(text, captured, cluster, mesh, config))
    said.check_pipeline(captured.microbatches)
    part = part_of(cluster, said.pp)
    return staged_baseline(said, make_program(captured), make_pricer(mesh=mesh, cluster=part, config=config), cluster)


def staged_baseline(said: NamedConfiguration, program: Program, pricer: Pricer, cluster: Cluster) -> Plan:
    """The configuration in stages; the pricer is that of one pipeline rank's part of the cluster."""
    limit = memory_limit(pricer.cluster, pricer.config)
    room, least = said.pp * limit, float("inf")
    for _ in range(TRIES):
        try:
            plan = baseline_plan(str(said), program, pricer.for_another(), room)
        except InfeasibleError as error:
            if error.least_nbytes is None:
                raise
            least = min(least, max(error.least_nbytes / said.pp, limit))
            break
        made = _cut(said, plan, program, pricer, cluster)
        peak = made.estimate.peak_nbytes
        if peak <= limit:
            return made
        least = min(least, peak)
        room *= LESS * limit / peak
    raise InfeasibleError(
        f"{said} does not fit: its fullest rank needs {least_gigabytes(least)} GB of {gigabytes(limit)} GB a device; "
        "use more devices, a smaller micro-batch, another ZeRO stage, another schedule or recompute=full",
        least_nbytes=least,
    )


def _cut(said: NamedConfiguration, plan: StagePlan, program: Program, pricer: Pricer, cluster: Cluster) -> Plan:
    cuts = choose_cuts(plan, program, pricer, said.num_stages)
    made, stages = staged(plan, program, pricer, said.pp, said.pipeline_schedule, cuts)
    try:
        return replace(priced(made, stages, cluster, pricer.cluster), origin=str(said))
    except ArgumentError as error:
        raise ArgumentError(f"{said} has no price: {error}; choose another schedule or number of them") from error
