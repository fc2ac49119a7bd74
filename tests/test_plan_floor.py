"""Of plans: no step is below the physical floor, and none is faster on slower parts or with more to do.

The same of configurations stands in test_cost_step.py. Flops are torch's own count of a run of the model.
"""

import random
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from autopar.cost_models.collectives import wire_bytes
from autopar.lower.messages import messages_of
from autopar.passes.split_stages import split_stages
from autopar.search.costs.evaluate import evaluate
from autopar.search.explanation.what_if import faster_arithmetic, faster_link, faster_memory
from autopar.search.known.random_plan import random_cuts, random_plan, random_recompute, random_staged_plan
from autopar.search.meshes import parts
from autopar.search.staged.stages import priced
from autopar.search.timeline.plan_timeline import plan_timeline
from autopar.search.timeline.weave import Overlap
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.graph import CapturedModel
from autopar.values.mesh import make_mesh
from autopar.values.placement import local_shape
from autopar.values.plan import one_stage
from autopar.values.stage_plan import StagePlan
from tests.search_cases import captured_of
from tests.test_plan_timeline import part_of
from tests.zoo import zoo
from tests.zoo_graphs import zoo_graph

CLUSTERS = ("2x2xh100", "4xa100", "4xcpu")
FAMILIES = ("gpt2", "vit", "resnet")


def drawn(captured: CapturedModel, seed: int) -> StagePlan:
    rng = random.Random(seed)
    plan = random_plan(captured, make_mesh((4,) if seed % 2 else (2, 2)), rng)
    return random_recompute(plan, captured, rng, share=0.4) if seed > 1 else plan


@cache
def product_flops(family: str) -> float:
    """Of all matrix products and convolutions, forward and backward, as torch counts them in a run."""
    model, batch = zoo(family)
    with FlopCounterMode(display=False) as counter:
        model(**batch).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    return float(sum(n for op, n in counts.items() if any(w in str(op) for w in ("mm", "convolution"))))


@pytest.mark.parametrize("family", FAMILIES)
def test_no_plan_is_below_the_physical_floor(family: str) -> None:
    captured = captured_of(family)
    for seed, name in enumerate(CLUSTERS):
        cluster, plan = load_cluster(name), drawn(captured, seed)
        device, seconds = cluster.device, evaluate(plan, captured, cluster).seconds
        worked = seconds["forward"] + seconds["backward"]
        assert worked >= product_flops(family) / 4 / device.peak("float32") > 0
        shards = {
            p.placeholder: local_shape(p.shape, plan.layouts[p.placeholder], plan.mesh) for p in captured.parameters
        }
        stored = sum(torch.Size(shape).numel() * 4 for shape in shards.values())
        assert seconds["optimizer"] >= 7 * stored / device.memory_bandwidth, "AdamW reads four tensors, writes three"
        fastest = max(
            line for level in cluster.levels for line in (level.bandwidth, *(x.bandwidth for x in level.lines))
        )
        floor = dict.fromkeys(("all_gather", "reduce_scatter", "all_reduce", "all_to_all"), 0.0)
        for (kind, axes), (_, nbytes) in messages_of(captured, plan, on_host=True).items():
            size = 1
            for axis in axes:
                size *= plan.mesh.shape[plan.mesh.names.index(axis)]
            once = (size - 1) / size * nbytes  # a switch that reduces sends all once
            floor[kind] += once / fastest
            assert wire_bytes(kind, nbytes, size) >= once * (1 - 1e-9)
        assert all(seconds[kind] >= least for kind, least in floor.items()) and sum(floor.values()) > 0
        woven = plan_timeline(one_stage(plan), [captured], cluster, Overlap()).seconds
        assert woven >= max(worked + seconds["recompute"] + seconds["optimizer"], *floor.values())


def slowed(cluster: Cluster) -> Iterator[tuple[str, Cluster]]:
    for depth, level in enumerate(cluster.levels):
        yield level.name, faster_link(cluster, depth, 0.5)
    yield "memory", faster_memory(cluster, 0.5)
    yield "arithmetic", faster_arithmetic(cluster, 0.5)


@pytest.mark.parametrize("name", CLUSTERS[::2])
def test_no_plan_is_faster_where_a_part_is_slower(name: str) -> None:
    cluster = load_cluster(name)
    for seed, family in enumerate(FAMILIES):
        captured = captured_of(family)
        plan = drawn(captured, seed)
        before = evaluate(plan, captured, cluster).step_seconds
        slower = {part: evaluate(plan, captured, worse).step_seconds for part, worse in slowed(cluster)}
        assert all(seconds >= before * (1 - 1e-12) for seconds in slower.values()), slower
        assert max(slower.values()) > before


def test_no_plan_in_stages_is_faster_where_a_part_is_slower() -> None:
    captured, rng, cluster = part_of("gpt2", 4), random.Random(0), load_cluster("2x2xh100")
    cuts = random_cuts(captured, 2, rng)
    plan = random_staged_plan(captured, make_mesh((2,)), "1f1b", 2, cuts, rng)
    stages = split_stages(captured, cuts)

    def seconds(machine: Cluster) -> float:
        return priced(plan, stages, machine, parts(machine)[2]).estimate.step_seconds

    before = seconds(cluster)
    slower = {part: seconds(worse) for part, worse in slowed(cluster)}
    assert all(after >= before * (1 - 1e-12) for after in slower.values()), slower
    assert slower[cluster.levels[0].name] > before and slower[cluster.levels[1].name] > before


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_no_plan_is_faster_with_a_larger_batch(family: str) -> None:
    """Every message grows or stays: the same decisions, twice the samples."""
    small, large, cluster = captured_of(family), zoo_graph(family, batch=16), load_cluster("2x2xh100")
    for seed in (0, 3):
        plan = drawn(small, seed)
        few, many = (evaluate(plan, graph, cluster).seconds for graph in (small, large))
        assert all(many[kind] >= few[kind] * (1 - 1e-12) for kind in few)
        assert sum(many.values()) > sum(few.values())
