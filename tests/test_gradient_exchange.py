"""Exchange systems: simulated = closed form, merge = brute force; and the survey's measurements, if at hand."""

import math
import random
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from autopar.cost_models.gradient_exchange.all_reduce import HierarchicalAllReduce, RingAllReduce, TreeAllReduce
from autopar.cost_models.gradient_exchange.bulk_synchronous import BulkSynchronous
from autopar.cost_models.gradient_exchange.byte_scheduler import ByteScheduler
from autopar.cost_models.gradient_exchange.contract import Architecture, ExchangeSchedule
from autopar.cost_models.gradient_exchange.exchange import exchange
from autopar.cost_models.gradient_exchange.horovod import Horovod
from autopar.cost_models.gradient_exchange.merged_gradients import (
    MergedGradients,
    merge_with_starts,
    optimal_merge,
    published_merge,
)
from autopar.cost_models.gradient_exchange.model import ExchangeModel, Gradient
from autopar.cost_models.gradient_exchange.network import Network, network_of
from autopar.cost_models.gradient_exchange.parameter_server import ParameterServer
from autopar.cost_models.gradient_exchange.recommend import architectures, recommend, schedules
from autopar.cost_models.gradient_exchange.wait_free import WaitFree
from autopar.cost_models.timeline import busy_seconds
from autopar.cost_models.trace import chrome_trace
from autopar.errors import ArgumentError
from autopar.values.cluster import load_cluster
from benchmarks import survey, survey_fit, survey_models


def network(nodes: int = 4, devices: int = 4, node_bandwidth: float = 1e9, hop: float = 2e-5) -> Network:
    return Network(
        name="test",
        nodes=nodes,
        devices=devices,
        node_bandwidth=node_bandwidth,
        local_bandwidth=8e9,
        hop_seconds=hop,
    )


def random_model(seed: int, count: int = 12) -> ExchangeModel:
    rng = random.Random(seed)
    gradients = tuple(
        Gradient(f"g{k}", 10 ** rng.uniform(3, 7), rng.choice([0.0, rng.uniform(0, 4e-3)]), rng.uniform(0, 2e-3))
        for k in range(count)
    )
    return ExchangeModel(name="random", gradients=gradients, update_seconds=rng.uniform(0, 1e-2))


def last_end(ready: np.ndarray, sizes: list[float], alpha: float, beta: float) -> float:
    """Messages one after the other on one link."""
    end = 0.0
    for time, nbytes in zip(ready, sizes, strict=True):
        end = max(end, time) + alpha + beta * nbytes
    return end


@pytest.mark.parametrize("seed", range(10))
def test_bsp_and_wfbp_are_their_closed_forms(seed: int) -> None:
    model = random_model(seed)
    for architecture in (RingAllReduce(network=network()), TreeAllReduce(network=network(nodes=3))):
        alpha, beta = architecture.line()
        bsp = exchange(model, architecture, BulkSynchronous())
        assert bsp.seconds == pytest.approx(model.compute_seconds + alpha + beta * model.nbytes.sum(), rel=1e-12)
        assert bsp.exposed_seconds == pytest.approx(alpha + beta * model.nbytes.sum(), rel=1e-9)
        wfbp = exchange(model, architecture, WaitFree())
        end = last_end(model.ready, model.nbytes.tolist(), alpha, beta)
        assert wfbp.seconds == pytest.approx(max(end, model.ready[-1]) + model.update_seconds, rel=1e-12)


def test_lines_of_all_reduce() -> None:
    link = network(nodes=4, devices=4, node_bandwidth=1e9)
    assert RingAllReduce(network=link).line() == (30 * 2e-5, pytest.approx(30 / 16 / 1e9))
    assert TreeAllReduce(network=link).line() == (8 * 2e-5, pytest.approx(2 / 1e9))
    assert RingAllReduce(network=network(nodes=1)).line()[1] == pytest.approx(6 / 4 / 8e9)
    assert RingAllReduce(network=network(nodes=1, devices=1)).line() == (0.0, 0.0)
    assert TreeAllReduce(network=network(nodes=1, devices=1)).line() == (0.0, 0.0)
    crowded = Network(
        name="c", nodes=6, devices=1, node_bandwidth=1e9, local_bandwidth=8e9, hop_seconds=0.0, crowding=0.25
    )
    assert RingAllReduce(network=crowded).line()[1] == pytest.approx(10 / 6 * 2 / 1e9)
    model = random_model(3)
    total = model.nbytes.sum()
    two_level = exchange(model, HierarchicalAllReduce(network=link), BulkSynchronous())
    expected = (6 + 6) * 2e-5 + 2 * 3 / 4 * total / 8e9 + 2 * 3 / 4 * total / 1e9
    assert two_level.exposed_seconds == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("servers", [None, 1, 2, 4, 8])
def test_bytes_that_a_server_carries(servers: int | None) -> None:
    """Of one gradient of 64 equal parts: the busiest link, and a step that waits for it."""
    nodes, part = 4, 1e6
    link = network(nodes=nodes, hop=0.0)
    model = ExchangeModel(name="one", gradients=(Gradient("g", 64 * part, 1e-3, 1e-3),))
    step = exchange(model, ParameterServer(network=link, servers=servers, part_nbytes=part), BulkSynchronous())
    busiest = busy_seconds(step.tasks)[2:].max()
    if servers is None:
        assert busiest == pytest.approx(2 * (nodes - 1) / nodes * 64 * part / 1e9), "2 (n - 1)/n S a machine"
    else:
        assert busiest == pytest.approx(nodes * 64 * part / servers / 1e9)
    assert step.exposed_seconds >= busiest
    one_way = (nodes - 1 if servers is None else nodes) * part / 1e9
    assert step.exposed_seconds <= busiest + 2 * one_way + 2 * 64 * 0.75 * part / 8e9 + 1e-12


def test_servers_on_one_machine_are_not_asked() -> None:
    model = random_model(0)
    step = exchange(model, ParameterServer(network=network(nodes=1)), BulkSynchronous())
    assert step.exposed_seconds == pytest.approx(2 * 0.75 * model.nbytes.sum() / 8e9, rel=1e-9)


def all_merges(count: int) -> list[list[tuple[int, int]]]:
    """First and last gradient of each message, for every way to cut so many gradients."""
    every = (cuts for k in range(count) for cuts in combinations(range(1, count), k))
    return [[(a, b - 1) for a, b in pairwise((0, *cuts, count))] for cuts in every]


@pytest.mark.parametrize("seed", range(40))
def test_the_merge_is_the_best_of_all_merges(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    model = random_model(seed, count)
    alpha, beta = 10 ** rng.uniform(-5, -2), 10 ** rng.uniform(-11, -8)

    def end(groups: list[tuple[int, int]]) -> float:
        sizes = [float(model.nbytes[first : last + 1].sum()) for first, last in groups]
        return last_end(model.ready[[last for _, last in groups]], sizes, alpha, beta)

    merges = all_merges(count)
    best = min(end(groups) for groups in merges)
    optimal = optimal_merge(model.ready, model.nbytes, alpha, beta)
    assert optimal in merges
    assert end(optimal) == pytest.approx(best, rel=1e-12)
    published = published_merge(model.ready, model.nbytes, alpha, beta, least_nbytes=0.0)
    assert published in merges
    assert end(published) <= end([(k, k) for k in range(count)]) + 1e-12, "the authors' rule is never worse than WFBP"


@pytest.mark.parametrize("seed", range(40))
def test_the_merge_is_the_best_where_starts_take_the_processor(seed: int) -> None:
    """Against all merges, each run message by message: the processor computes, and starts what is ready."""
    rng = random.Random(seed)
    count = rng.randint(1, 9)
    model = random_model(seed, count)
    alpha, beta = 10 ** rng.uniform(-5, -2), 10 ** rng.uniform(-11, -8)
    start = rng.choice([0.0, alpha, 0.3 * alpha, 10 * alpha])
    busy = rng.choice([0.0, beta, 0.5 * beta]) if start else 0.0
    bent = rng.choice([0.0, 10 ** rng.uniform(-8, -5)])

    def seconds(n: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return np.asarray(alpha + beta * n + bent * np.sqrt(n))

    def step(groups: list[tuple[int, int]]) -> float:
        clock = computed = sent = 0.0
        for first, last in groups:
            clock += model.ready[last] - computed
            computed = model.ready[last]
            nbytes = model.nbytes[first : last + 1].sum()
            sent = max(sent, clock) + float(seconds(nbytes))
            clock += start + busy * nbytes
        return max(clock, sent)

    merges = all_merges(count)
    found = merge_with_starts(model.ready, model.nbytes, seconds, start, busy)
    assert found in merges
    assert step(found) == pytest.approx(min(map(step, merges)), rel=1e-12)


def test_published_merge_by_hand() -> None:
    ready = np.array([1.0, 1.2, 3.0, 9.0])
    nbytes = np.array([1e6, 1e6, 1e6, 1e6])
    # the second is ready less than alpha after the first; the third while they are sent; the fourth long after
    assert published_merge(ready, nbytes, 0.5, 1e-6) == [(0, 1), (2, 2), (3, 3)]
    assert published_merge(ready, nbytes, 20.0, 1e-6) == [(0, 3)]
    assert published_merge(ready, np.array([1e6, 1e6, 100.0, 1e6]), 0.5, 1e-6) == [(0, 1), (2, 3)], "too small to send"


@pytest.mark.parametrize("seed", range(10))
def test_merging_is_never_worse_than_one_message_or_one_a_gradient(seed: int) -> None:
    model = random_model(seed, 30)
    for architecture in (RingAllReduce(network=network()), TreeAllReduce(network=network(hop=1e-3))):
        merged = exchange(model, architecture, MergedGradients()).seconds
        for other in (BulkSynchronous(), WaitFree(), Horovod(), MergedGradients(believed=(1e-4, 1e-9))):
            assert merged <= exchange(model, architecture, other).seconds + 1e-12


def systems(link: Network) -> list[tuple[Architecture, ExchangeSchedule]]:
    return [(architecture, schedule) for architecture in architectures(link, 2) for schedule in schedules()]


@pytest.mark.parametrize("seed", range(4))
def test_floors(seed: int) -> None:
    """No step is shorter than its computation, nor than the work of any of its links."""
    model = random_model(seed, 20)
    for architecture, schedule in systems(network(nodes=2 + seed)):
        step = exchange(model, architecture, schedule)
        assert step.seconds >= model.compute_seconds - 1e-12
        links = busy_seconds(step.tasks)[1 : 1 + len(architecture.streams)].max()
        rounds = 4 if schedule.overlaps_forward else 1
        assert step.seconds >= links / rounds - 1e-9, (architecture.name, schedule.name)
        if not schedule.overlaps_forward:
            assert step.seconds >= model.ready[-1] + architecture.line()[1] * model.nbytes[-1]


@pytest.mark.parametrize("seed", range(4))
def test_slower_links_and_larger_gradients_are_never_faster(seed: int) -> None:
    model = random_model(seed, 20)
    larger = ExchangeModel(
        name="larger",
        gradients=tuple(g._replace(nbytes=1.3 * g.nbytes) for g in model.gradients),
        update_seconds=model.update_seconds,
    )
    for make in (RingAllReduce, TreeAllReduce, HierarchicalAllReduce):
        for schedule in (BulkSynchronous(), WaitFree(), MergedGradients()):
            times = [
                exchange(model, make(network=network(node_bandwidth=b)), schedule).seconds
                for b in (1e10, 3e9, 1e9, 3e8, 1e8)
            ]
            assert all(a <= b + 1e-12 for a, b in pairwise(times)), (make, schedule.name)
            assert exchange(larger, make(network=network()), schedule).seconds >= times[2] - 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_more_overlap_is_never_slower(seed: int) -> None:
    """The same messages in the same order: sent as they are ready, and with forward started layer by layer."""
    model = random_model(seed, 20)
    ring = RingAllReduce(network=network())
    whole = exchange(model, ring, WaitFree()).seconds
    assert exchange(model, ring, WaitFree(overlaps_forward=True)).seconds <= whole + 1e-12
    one = exchange(model, ring, BulkSynchronous()).seconds
    assert exchange(model, ring, BulkSynchronous(overlaps_forward=True)).seconds <= one + 1e-12
    alpha, beta = ring.line()
    assert whole <= model.compute_seconds + len(model.gradients) * alpha + beta * model.nbytes.sum() + 1e-12


def test_priority_hides_what_fifo_exposes() -> None:
    """Two layers; the last layer's gradient is ready first and long to send, the first layer's is short and urgent."""
    gradients = (Gradient("last", 8e6, 1.0, 1.0), Gradient("first", 1e6, 1.0, 1.0))
    model = ExchangeModel(name="two", gradients=gradients)
    link = Network(name="l", nodes=2, devices=1, node_bandwidth=2e6, local_bandwidth=1e9, hop_seconds=0.0)
    ring = RingAllReduce(network=link)  # half a second a million bytes
    fifo = exchange(model, ring, WaitFree()).seconds
    assert fifo == pytest.approx(2 + 1 + 4 + 0.5)
    urgent = exchange(model, ring, ByteScheduler(partition_nbytes=1e6, credit_nbytes=0.0)).seconds
    assert urgent == pytest.approx(4 + 0.5 + 1 + 1), "the first layer's forward and backward run meanwhile"
    unparted = exchange(model, ring, ByteScheduler(partition_nbytes=1e9, credit_nbytes=0.0)).seconds
    handed_over = exchange(model, ring, ByteScheduler(partition_nbytes=1e6, credit_nbytes=1e9)).seconds
    assert unparted == handed_over == pytest.approx(fifo)


def test_horovod_sends_what_a_cycle_has_made_ready() -> None:
    gradients = tuple(Gradient(f"g{k}", 1e6, 2e-3, 0.0) for k in range(6))  # ready at 2, 4, 6, 8, 10, 12 ms
    model = ExchangeModel(name="six", gradients=gradients)
    ring = RingAllReduce(network=network())
    sent = Horovod(cycle_seconds=5e-3).messages(model, ring)
    assert [(m.first, m.last) for m in sent] == [(0, 1), (2, 4), (5, 5)]
    assert [m.delay for m in sent] == pytest.approx([1e-3, 0.0, 3e-3])
    small = Horovod(cycle_seconds=5e-3, fusion_nbytes=2e6).messages(model, ring)
    assert [(m.first, m.last) for m in small] == [(0, 1), (2, 3), (4, 4), (5, 5)]
    assert [(m.first, m.last) for m in Horovod(fusion_nbytes=0).messages(model, ring)] == [(k, k) for k in range(6)]
    alpha, beta = ring.line()
    expected = last_end(np.array([5e-3, 10e-3, 15e-3]), [2e6, 3e6, 1e6], alpha, beta)
    assert exchange(model, ring, Horovod(cycle_seconds=5e-3)).seconds == pytest.approx(expected)


def test_recommendations_are_the_simulated_order() -> None:
    model = random_model(1, 40)
    for link in (network(), network(nodes=1), network(devices=1), network(node_bandwidth=1e7)):
        choices = recommend(model, link, spare_machines=2)
        assert all(a.seconds <= b.seconds + 1e-9 for a, b in pairwise(choices))
        seconds = {(a.name, s.name): exchange(model, a, s).seconds for a, s in systems(link)}
        assert {(c.architecture, c.schedule): c.seconds for c in choices} == seconds
        assert choices[0].seconds == pytest.approx(min(seconds.values()), abs=1e-9)
        assert choices[0].speedup == pytest.approx(link.ranks * model.compute_seconds / choices[0].seconds)
    assert {c.schedule for c in recommend(model, network(), only=["bsp", "wfbp"])} == {"bsp", "wfbp"}
    assert not [c for c in recommend(model, network()) if "server" in c.architecture and "co-loc" not in c.architecture]


def test_where_each_wins() -> None:
    """Start-up time asks for merging, spare machines for servers, a slow network for overlap with forward."""
    many = ExchangeModel(name="many", gradients=tuple(Gradient(f"{k}", 1e4, 1e-4, 5e-5) for k in range(200)))
    assert recommend(many, network(hop=1e-4), only=["bsp", "wfbp", "mg-wfbp"])[0].schedule == "mg-wfbp"
    large = ExchangeModel(name="large", gradients=tuple(Gradient(f"{k}", 2e7, 1e-2, 5e-3) for k in range(10)))
    slow = network(node_bandwidth=1e9, hop=1e-6)
    best = recommend(large, slow, spare_machines=8)[0]
    assert best.architecture == "8 parameter servers", "half the bytes of a ring on each machine's link"
    assert best.schedule == "bytescheduler"


def test_a_cluster_as_a_network() -> None:
    cluster = load_cluster("4x8xh100")
    link = network_of(cluster)
    assert (link.nodes, link.devices, link.ranks) == (4, 8, 32)
    assert link.node_bandwidth == pytest.approx(8 * cluster.levels[0].bandwidth_per_device)
    alone = network_of(load_cluster("8xh100"))
    assert (alone.nodes, alone.devices) == (1, 8)


def test_a_step_as_a_trace() -> None:
    step = exchange(random_model(2), ParameterServer(network=network(), servers=2), Horovod())
    trace = chrome_trace(step.tasks, step.timeline, names=step.names, streams=step.streams)
    ends = [e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(step.seconds * 1e6)


def test_bad_input() -> None:
    model = random_model(0)
    with pytest.raises(ArgumentError, match="no gradient"):
        ExchangeModel(name="none", gradients=())
    with pytest.raises(ArgumentError, match="more than 0 bytes"):
        ExchangeModel(name="bad", gradients=(Gradient("g", 0.0, 0.0, 0.0),))
    with pytest.raises(ArgumentError, match="no negative time"):
        ExchangeModel(name="bad", gradients=(Gradient("g", 1.0, -1.0, 0.0),))
    for changes in ({"nodes": 0}, {"node_bandwidth": -1.0}, {"node_bandwidth": math.nan}, {"hop": -1.0}):
        with pytest.raises(ArgumentError, match="network test"):
            network(**changes)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="0 parameter servers"):
        ParameterServer(network=network(), servers=0)
    with pytest.raises(ArgumentError, match=r"parts of 0\.0 bytes"):
        ParameterServer(network=network(), part_nbytes=0.0)
    with pytest.raises(ArgumentError, match="partitions of 0"):
        ByteScheduler(partition_nbytes=0)
    with pytest.raises(ArgumentError, match="cycles of 0"):
        Horovod(cycle_seconds=0)
    with pytest.raises(ArgumentError, match="'poseidon' is unknown; choose from bsp, wfbp"):
        recommend(model, network(), only=["poseidon"])
    with pytest.raises(ArgumentError, match="-1 spare machines"):
        recommend(model, network(), spare_machines=-1)


def test_rows_of_the_survey_that_cannot_be_read(tmp_path: Path) -> None:
    header = "id,model,batch_per_gpu,connection,method,gpus,gpus_per_node,single_gpu_samples_per_s,samples_per_s"
    good = "a,ResNet-50,64,10GbE,BSP-PS,8,4,253,1000"
    file = tmp_path / "ddl_survey.csv"
    file.write_text(f"{header}\n{good}\n")
    assert survey_fit.read_rows(tmp_path)[0].seconds == pytest.approx(64 * 8 / 1000)
    for bad in (good.replace("253", "fast"), good.replace("ResNet-50", "BERT-Base")):
        file.write_text(f"{header}\n{good}\n{bad}\n")
        with pytest.raises(ArgumentError, match="line 3"):
            survey_fit.read_rows(tmp_path)
    assert survey_fit.line_rate("100GbIB with RDMA") == 12.5e9
    with pytest.raises(ArgumentError, match="does not begin with its line rate"):
        survey_fit.line_rate("Myrinet")


def test_models_of_the_survey_have_their_bytes() -> None:
    """25,557,032 parameters of ResNet-50 and 110,111,042 of BERT-Base, as torchvision and transformers count them."""
    base = survey_models.Bert(sentences=64, tokens=64, layers=12, hidden=768, heads=12, inner=3072, vocabulary=30528)
    for sizes, parameters, tensors in [(64, 25_557_032, 161), (base, 110_111_042, 206)]:
        model = survey_models.model("model", sizes, 0.25, 0.0)
        assert (model.nbytes.sum(), len(model.gradients)) == (4 * parameters, tensors)
        assert model.compute_seconds == pytest.approx(0.25)
        assert model.forward_seconds == pytest.approx(0.25 / 3)


@pytest.mark.skipif(not survey.REFERENCES.is_dir(), reason="needs the published measurements beside the repository")
def test_the_survey() -> None:
    """What docs/results/fidelity.md says of it; ByteScheduler on all-to-all is known to be off without a profile."""
    constants, table = survey.predictions(survey.REFERENCES)
    assert survey.misses(table) == []
    errors, unprofiled = survey.mean_errors(table), survey.mean_errors(table, "predicted")
    assert max(errors.values()) < 0.06
    assert unprofiled[survey.PROFILED] > 0.06, "no row of BSP shows what ByteScheduler's threads cost"
    assert {method for method in errors if errors[method] != unprofiled[method]} == {survey.PROFILED}
    assert survey.near_fastest(table) >= 0.9
    for row in survey.headlines(table):
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.05)
    for name, peak in [("10GbE with TCP/IP", 1.25e9), ("100GbE with TCP/IP", 12.5e9), ("100GbIB with RDMA", 12.5e9)]:
        assert constants.node_bandwidth[name] <= peak
        assert constants.server_bandwidth[name] <= peak
