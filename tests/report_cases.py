"""Plans for tests of the page about a plan: of one stage and of several, with graph and machine."""

import random
from dataclasses import replace
from functools import lru_cache

from autopar.api.model_plan import ModelPlan, model_plan
from autopar.lower.program import make_program
from autopar.passes.accumulate_gradients import accumulate_gradients
from autopar.passes.split_stages import split_stages
from autopar.search.costs.evaluate import evaluate
from autopar.search.known.baselines import baseline_plan
from autopar.search.known.random_plan import random_cuts, random_staged_plan
from autopar.search.meshes import parts
from autopar.search.staged.stages import priced
from autopar.search.timeline.named_in_buckets import named_in_buckets
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.plan import one_stage
from tests.search_cases import machine, pricer_of
from tests.zoo_graphs import zoo_graph

HOSTILE = """</script><script>window.hacked = 1</script><img src=x onerror="window.hacked=1">'`{{data}}\u2028&amp;"""


@lru_cache
def llama(microbatches: int = 1) -> CapturedModel:
    """One of so many micro-batches of a Llama's batch of eight."""
    rows = 8 // microbatches
    return accumulate_gradients(zoo_graph("llama", rows), microbatches, lambda: zoo_graph("llama"))


@lru_cache
def flat_plan(name: str = "fsdp", *, in_buckets: bool = False, microbatches: int = 1) -> ModelPlan:
    """A named plan of a Llama of two layers on 2x2."""
    captured = llama(microbatches)
    program, pricer = make_program(captured), pricer_of((2, 2))
    if in_buckets:
        plan = named_in_buckets(name, program, pricer, 1e12)
    else:
        plan = baseline_plan(name, program, pricer, 1e12)
    return model_plan(one_stage(plan), captured=captured, machine=machine())


@lru_cache
def woven_plan() -> ModelPlan:
    """Fully sharded, in two micro-batches at once."""
    captured = llama(2)
    program, pricer = make_program(captured), pricer_of((2, 2))
    plan = replace(baseline_plan("fsdp", program, pricer, 1e12), copies=2)
    plan = plan.with_estimate(evaluate(plan, captured, machine()))
    return model_plan(one_stage(plan), captured=captured, machine=machine())


@lru_cache
def staged_plan(schedule: str = "1f1b", stages: int = 2) -> ModelPlan:
    """A random plan of the same in stages on two ranks of mesh 2."""
    captured, rng, cluster = llama(4), random.Random(1), machine(4)
    cuts = random_cuts(captured, stages, rng)
    plan = random_staged_plan(captured, make_mesh((2,)), schedule, 2, cuts, rng, recompute=0.3)
    plan = priced(plan, split_stages(captured, cuts), cluster, parts(cluster)[2])
    return model_plan(plan, captured=captured, machine=cluster)
