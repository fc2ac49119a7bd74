"""Ways over several axes change what is sent where, and nothing else; a bucket takes the cheapest for all its bytes.

Random ways on random plans of every family: one axis after the other, flattened, in levels. What comes out is one
process's, and every byte was predicted.
"""

import math
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_runtime_train_step import exported, train_distributed, train_whole

import tests.runtime_cases as cases
from autopar.api.model_plan import model_plan
from autopar.lower.emit import emit
from autopar.lower.messages import messages_of
from autopar.oracle.reference import buffers_of
from autopar.search.costs.bucket_ways import ways_between
from autopar.search.costs.evaluate import evaluate, evaluate_program
from autopar.search.costs.pricing import make_pricer
from autopar.search.known.baselines import make_baseline
from autopar.search.known.random_plan import random_buckets, random_plan, random_ways
from autopar.search.timeline.buckets import with_buckets
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.mesh import make_mesh
from autopar.values.placement import INVARIANT, REPLICATE, Layout
from autopar.values.plan import one_stage
from autopar.values.plan_file import plan_from_json
from autopar.values.redistribution import in_levels, messages, step_between
from autopar.values.stage_plan import StagePlan, Way
from autopar.values.train_config import TrainConfig
from benchmarks.race_traffic import crossing_nbytes
from tests.plans_in_threads import errors_of, one_process
from tests.process_group import ranks
from tests.search_cases import captured_of, exact_of, program_of
from tests.zoo import zoo

WHOLE, COPIES = Layout((INVARIANT, INVARIANT)), Layout((REPLICATE, REPLICATE))


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_random_ways_equal_one_process(kind: str) -> None:
    model, kwargs = zoo("llama", dtype=torch.float64)
    captured = exact_of("llama")
    rng = random.Random(f"ways {kind}")
    plan = make_baseline(kind, captured, two_hosts(1e-9), make_mesh((2, 2)), TrainConfig())
    nested = {name: Layout(layout.axes) for name, layout in plan.layouts.items()}  # as a flattened group is
    plan = random_buckets(random_ways(replace(plan, layouts=nested), captured, rng), captured, rng, share=0.6)
    assert any(way.inside for way in plan.ways.values()) == (kind == "ddp")
    assert {len(way.path) for way in plan.ways.values()} == {2, 3}
    errors = errors_of(one_process(captured, model, kwargs), plan, late=rng.random() < 0.7)
    assert errors[0] <= 1e-10 and errors[1] <= 1e-8, errors


def test_whole_copies_have_five_ways_over_two_axes() -> None:
    found = ways_between(WHOLE, COPIES, (3, 5), make_mesh((2, 3)))
    assert sorted(tuple(axes for _, _, axes, _ in word) for word in found) == [
        *[((0,), (1,)), *[((0, 1),)] * 3, ((1,), (0,))]
    ]
    assert {way.inside for way in found.values()} == {(), ("data",), ("model",)}


@pytest.mark.parametrize(("shape", "inside"), [((2, 4), (1,)), ((2, 4), (0,)), ((3, 2), (0,))])
def test_levels_send_each_part_once_outside(shape: tuple[int, ...], inside: tuple[int, ...]) -> None:
    """N elements, padded to N': N' - N'/i and back inside, a ring of N'/i outside; never more than both in a row."""
    step = in_levels(step_between(WHOLE, COPIES), inside)
    forward, sent = messages(step, (7, 11), 4, make_mesh(shape))
    i = shape[inside[0]]
    padded = math.ceil(77 / i) * i * 4
    assert not forward
    assert [(m.kind, m.axes, m.nbytes) for m in sent] == [
        ("reduce_scatter", inside, padded),
        ("all_reduce", (1 - inside[0],), padded // i),
        ("all_gather", inside, padded),
    ]
    with pytest.raises(ValueError, match="reduces no gradients"):
        in_levels(step_between(WHOLE, COPIES), (0, 1))


def two_hosts(network: float, start: float = 1e-4) -> Cluster:
    """Two hosts of two; seconds a byte of the network, and of a start."""
    cluster = load_cluster("2x2xcpu@10gbe")
    slow, fast = cluster.levels
    return replace(
        cluster,
        levels=(replace(slow, bandwidth=1 / network, alpha=start), replace(fast, bandwidth=1e9, alpha=start)),
    )


def ddp(cluster: Cluster) -> StagePlan:
    return make_baseline("ddp", captured_of("llama"), cluster, make_mesh((2, 2)), TrainConfig())


def test_a_slow_network_is_crossed_in_levels_and_starts_that_are_dear_are_few() -> None:
    captured = captured_of("llama")
    plan = with_buckets(ddp(two_hosts(1e-6)), captured, two_hosts(1e-6))
    assert {way.inside for way in plan.ways.values()} == {("model",)}
    sent = messages_of(captured, plan, on_host=True)
    nbytes = sum(n for (kind, axes), (_, n) in sent.items() if (kind, axes) == ("all_gather", ("model",)))
    assert sent["all_reduce", ("data",)][1] == pytest.approx(nbytes / 2, rel=0.01)
    usual = with_buckets(ddp(two_hosts(1e-6)), captured, two_hosts(1e-6), flatten=False)
    assert not usual.ways
    before, after = (crossing_nbytes(emit(captured, p)) for p in (usual, plan))
    assert after < 0.7 * before


def test_no_way_of_a_bucket_is_cheaper_than_the_one_it_takes() -> None:
    """Brute force: every parameter of the bucket on each of the five ways, priced as a plan."""
    captured = captured_of("llama")
    for network, start in ((1e-6, 1e-4), (1e-9, 1e-3), (1e-8, 1e-6)):
        cluster = two_hosts(network, start)
        found = with_buckets(ddp(cluster), captured, cluster)
        names = [name for bucket in found.buckets for name in bucket if len(bucket) > 2]
        best = math.inf
        for way in ways_between(WHOLE, COPIES, (4, 4), found.mesh).values():
            other = replace(found, ways={**found.ways, **dict.fromkeys(names, way)})
            best = min(best, evaluate(other, captured, cluster).step_seconds)
        assert found.estimate.step_seconds <= best * (1 + 1e-9)


def test_what_ways_save_is_said_and_is_part_of_what_buckets_save() -> None:
    captured, cluster = captured_of("llama"), two_hosts(1e-6)
    plan = ddp(cluster)
    found, usual = (with_buckets(plan, captured, cluster, flatten=flatten) for flatten in (True, False))
    assert found.estimate.alone_seconds == pytest.approx(plan.estimate.step_seconds)
    assert found.estimate.saved > found.estimate.saved_by_ways > 0 == usual.estimate.saved_by_ways
    loaded = plan_from_json(one_stage(found).to_json()).single
    assert loaded.ways == found.ways and loaded.estimate.saved_by_ways > 0


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_what_is_priced_is_what_is_predicted(family: str) -> None:
    """With links that cost a second a message and nothing a byte, seconds count messages."""
    captured, rng = captured_of(family), random.Random(family)
    plan = random_plan(captured, make_mesh((2, 2)), rng)
    plan = random_buckets(random_ways(plan, captured, rng), captured, rng)
    pricer = make_pricer(mesh=plan.mesh, cluster=two_hosts(1e-9), config=plan.config)
    pricer.message = lambda *_: (1.0, "")  # type: ignore[method-assign]
    seconds = evaluate_program(plan, program_of(family), pricer).seconds
    sent = messages_of(captured, plan, on_host=True)
    for kind in ("all_gather", "reduce_scatter", "all_reduce", "all_to_all"):
        assert round(seconds[kind]) == sum(calls for (k, _), (calls, _) in sent.items() if k == kind), kind


def in_levels_everywhere(count: int = 1) -> StagePlan:
    """Whole copies, half of them in one bucket, all in levels."""
    graph = cases.captured(microbatches=count)
    plan = make_baseline("ddp", graph, two_hosts(1e-9), make_mesh((2, 2)), TrainConfig())
    names = [spec.placeholder for spec in graph.parameters]
    ways = dict.fromkeys(names, Way(path=(WHOLE, COPIES), inside=("model",)))
    return replace(plan, ways=ways, buckets=(tuple(names[::2]),))


@pytest.mark.parametrize("count", [1, 2])
def test_training_in_levels_equals_one_process(count: int) -> None:
    losses, state = train_whole(count)
    for got_losses, got_state, bytes_as_said in ranks(4).run(train_distributed, in_levels_everywhere(count)):
        assert bytes_as_said
        assert got_losses == pytest.approx(losses, rel=1e-10)
        for key, value in state.items():
            torch.testing.assert_close(got_state[key], value, rtol=1e-8, atol=1e-9, msg=key)


def test_exported_code_trains_in_levels(tmp_path: Path) -> None:
    graph = cases.captured()
    model_plan(one_stage(in_levels_everywhere()), captured=graph, values=buffers_of(graph, cases.words())).export(
        tmp_path
    )
    assert "inside=" in "".join(path.read_text() for path in tmp_path.rglob("*.py"))
    for got, want, same in ranks(4).run(exported, str(tmp_path)):
        assert same and got == pytest.approx(want, rel=1e-12)
