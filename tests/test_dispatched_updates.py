"""What does a host's optimizer take for parameters that ranks have a part of, and for those beside them?"""

import math
from dataclasses import replace

import pytest

from autopar.cost_models.compute import rates_of
from autopar.search.costs.evaluate import evaluate_program
from autopar.search.costs.pricing import make_pricer
from autopar.search.in_buckets import best_in_buckets
from autopar.search.known.baselines import make_baseline
from autopar.search.planner import plan_program
from autopar.search.search_options import SearchOptions
from autopar.search.timeline.buckets import with_buckets
from autopar.values.cluster import Cluster
from autopar.values.mesh import make_mesh
from autopar.values.placement import Layout, Shard
from autopar.values.stage_plan import StagePlan
from autopar.values.train_config import TrainConfig
from tests.search_cases import captured_of, machine, program_of

LAUNCH = 1e-5


def updates(plan: StagePlan, cluster: Cluster) -> float:
    """Seconds of the optimizer."""
    pricer = make_pricer(mesh=plan.mesh, cluster=cluster, config=plan.config)
    return evaluate_program(plan, program_of("gpt2"), pricer).seconds["optimizer"]


@pytest.mark.parametrize("optimizer", ["adamw-fused", "sgd"])
def test_one_parameter_in_parts_makes_dtensors_of_all(optimizer: str) -> None:
    """As it runs in buckets; without any, as searches add up, it pays for itself alone; before a GPU's queue nobody."""
    host = machine(2)
    host = replace(host, device=replace(host.device, launch_seconds=LAUNCH))
    ddp = make_baseline("ddp", captured_of("gpt2"), host, make_mesh((2,)), TrainConfig(optimizer=optimizer))
    whole = with_buckets(ddp, captured_of("gpt2"), host)
    trained = [t for t in program_of("gpt2").tensors.values() if t.kind == "parameter" and t.requires_grad]
    name = max(trained, key=lambda tensor: tensor.shape[0]).name
    prices = make_pricer(mesh=whole.mesh, cluster=host, config=whole.config)
    assert whole.buckets and not any(prices.target.is_split(tensor, whole.layouts[tensor.name]) for tensor in trained)
    other = {"layouts": {**whole.layouts, name: Layout((Shard(0),))}, "ways": {}}
    others = tuple(left for names in whole.buckets if (left := tuple(n for n in names if n != name)))
    split = replace(whole, buckets=others, **other)
    prices = make_pricer(mesh=whole.mesh, cluster=host, config=whole.config)
    tensor = program_of("gpt2").tensors[name]
    before, after = (prices.optimizer_seconds(tensor, plan.layouts[name]) for plan in (whole, split))
    dispatch = rates_of(host.device).split_seconds  # of one kernel, which both optimizers have
    assert prices.target.is_split(tensor, split.layouts[name]) and dispatch == pytest.approx(3 * LAUNCH)
    assert updates(split, host) == pytest.approx(updates(whole, host) - before + after + (len(trained) - 1) * dispatch)
    alone = replace(split, buckets=())
    assert updates(alone, host) == pytest.approx(updates(whole, host) - before + after)
    gpu = replace(host, device=replace(host.device, name="another"))
    assert updates(split, gpu) == pytest.approx(updates(alone, gpu))


@pytest.mark.parametrize(
    ("launch", "bandwidth", "is_whole"), [(1e-5, 1e9, True), (3e-6, 1e9, True), (1e-6, 1e9, False)]
)
def test_a_plan_with_parameters_whole_is_looked_for_beside_one_that_splits_some(
    launch: float, bandwidth: float, is_whole: bool
) -> None:
    """A search adds up what each parameter pays for itself, and splits too many where launches are slow."""
    program, host = program_of("gpt2"), machine(2)
    host = replace(host, device=replace(host.device, launch_seconds=launch, memory_bandwidth=1e9))
    config = TrainConfig(optimizer="adamw-fused")
    pricer = make_pricer(mesh=make_mesh((2,)), cluster=host, config=config, in_buckets=True)
    options = SearchOptions(with_baselines=False)
    searched = plan_program(program, pricer, options)
    found = best_in_buckets(searched, program, pricer, options, spent=math.inf)
    parameters = [tensor for tensor in program.tensors.values() if tensor.kind == "parameter"]

    def splits(plan: StagePlan) -> bool:
        return any(pricer.target.is_split(tensor, plan.layouts[tensor.name]) for tensor in parameters)

    assert splits(searched) and splits(found) != is_whole
    assert "with parameters whole" in found.estimate.search.in_buckets
    assert (found.estimate.step_seconds < searched.estimate.step_seconds) == is_whole
