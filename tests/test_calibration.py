"""Calibration: fits recover what made the data, files carry them to the planner, ranks that cannot agree say so."""

import contextlib
import itertools
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from autopar.api.planning import plan
from autopar.calibration import measure_steps, timing
from autopar.calibration.check import check_ranks, compared, median_errors
from autopar.calibration.command import CalibrationRequest, run
from autopar.calibration.file import calibration_toml, check_writable
from autopar.calibration.fit import fit_cluster
from autopar.calibration.fit_device import fit_device
from autopar.calibration.fit_lines import fit_lines, unit_forms
from autopar.calibration.measure import Effort, device_name, measure, origin_of
from autopar.calibration.measure_collectives import KINDS, measuring_mesh, sizes_between
from autopar.calibration.predict import predicted_work
from autopar.calibration.processes import on_processes
from autopar.calibration.reference_steps import STEPS
from autopar.calibration.samples import CollectiveSample, Measurements, Origin, SkewSample, WorkSample
from autopar.calibration.timing import interquartile_mean
from autopar.cost_models.collectives import collective_seconds, skew_seconds
from autopar.cost_models.links import axis_links
from autopar.errors import ArgumentError, ClusterError, MeshError, RankError
from autopar.values.cluster import Cluster, load_cluster
from autopar.values.device import Device
from autopar.values.link import Line, LinkLevel
from tests.process_group import ranks

pytestmark = pytest.mark.usefixtures("copied_processes")

SIZES = sizes_between(1 << 10, 64 << 20, 13)


def origin(hosts: int = 1, per_host: int = 4, backend: str = "gloo") -> Origin:
    names = tuple(f"host{k}" for k in range(hosts))
    return Origin(
        date="2026-01-01",
        hosts=names,
        num_ranks=hosts * per_host,
        backend=backend,
        torch="2.13",
        device="cpu",
        memory_bytes=10**10,
    )


def device(rates: dict[str, float], bandwidth: float, launch: float) -> Device:
    return Device(
        name="synthetic",
        peak_flops=tuple(rates.items()),
        memory_bytes=10**10,
        memory_bandwidth=bandwidth,
        launch_seconds=launch,
        efficiency=1.0,
    )


def cluster_of(levels: list[LinkLevel], library: str = "gloo") -> Cluster:
    return Cluster(name="truth", device=device({"fp32": 1e11}, 1e10, 1e-5), levels=tuple(levels), library=library)


def samples_of(
    truth: Cluster, rng: random.Random, noise: float, outliers: float, kinds: tuple[str, ...] = KINDS
) -> tuple[CollectiveSample, ...]:
    """What a calibration would see of `truth`: log-normal noise, and now and then a call five times slower."""
    mesh, places = measuring_mesh([level.size for level in truth.levels])
    samples = []
    for place, kind, nbytes in itertools.product(places, kinds, SIZES):
        links = axis_links(truth, mesh.shape, tuple(mesh.names.index(name) for name in place.axes))
        seconds = collective_seconds(kind, nbytes, links)[0] * math.exp(rng.gauss(0, noise))
        seconds *= 5 if rng.random() < outliers else 1
        samples.append(
            CollectiveSample(kind=kind, level=place.level, group_size=place.size, nbytes=nbytes, seconds=seconds)
        )
    return tuple(samples)


def late_of(group_size: int, skew: float, level: int) -> SkewSample:
    seconds = skew * sum(1 / rank for rank in range(2, group_size + 1))
    return SkewSample(kind="all_reduce", level=level, group_size=group_size, compute_seconds=5e-3, seconds=seconds)


def work_of(truth: Device, rng: random.Random, noise: float) -> tuple[WorkSample, ...]:
    machine = Cluster(name="m", device=truth, levels=(LinkLevel(name="l", size=1, alpha=0.0, bandwidth=1.0),))
    shapes = [((m, n, k), 4.0 * (m * k + k * n + m * n)) for m, k, n in itertools.product((64, 512, 2048), repeat=3)]
    wanted = [(dtype, shape, nbytes, 2 * nbytes) for dtype, _ in truth.peak_flops for shape, nbytes in shapes]
    wanted += [("fp32", (), 8.0 * 16**power, 12.0 * 16**power) for power in range(7)]
    samples = []
    for dtype, product, nbytes, backward in wanted:
        sample = WorkSample(name="", dtype=dtype, product=product, nbytes=nbytes, backward_nbytes=backward, seconds=1.0)
        samples.append(replace(sample, seconds=predicted_work(machine, sample) * math.exp(rng.gauss(0, noise))))
    return tuple(samples)


def test_the_middle_half_forgets_outliers_and_adds_up() -> None:
    assert interquartile_mean([3.0]) == 3.0
    assert interquartile_mean([1.0, 2.0, 6.0]) == 3.0
    assert interquartile_mean([1e9, 2.0, 1.0, 4.0]) == 3.0
    rng = random.Random(0)
    rounds = [rng.choice((1.0, 3.0)) for _ in range(400)]  # slow half of the time
    assert interquartile_mean(rounds) == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("seed", range(8))
def test_a_line_is_recovered_from_noise_and_outliers(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice((4, 6, 8, 16))
    truth = LinkLevel(
        name="truth",
        size=size,
        alpha=10 ** rng.uniform(-6, -3),
        bandwidth=10 ** rng.uniform(9, 11.5),
        scope=rng.choice(("node", "network")),
    )
    library = rng.choice(("gloo", "nccl"))
    kind = rng.choice(KINDS)
    samples = samples_of(cluster_of([truth], library), rng, noise=0.05, outliers=0.05, kinds=(kind,))
    [lines] = fit_lines(kind, [(size, truth.scope, samples)], library)
    assert len(lines) == 1, "one line made the data"
    assert lines[0].bandwidth == pytest.approx(truth.bandwidth, rel=0.15)
    # Launch and alpha are told apart by group sizes alone, and a send has one hop in any: their sum is what counts.
    for n in {2, size}:
        form = unit_forms(kind, n, size, truth.scope, library)[0]
        assert lines[0].launch + form.alpha_seconds * lines[0].alpha == pytest.approx(
            form.alpha_seconds * truth.alpha, rel=0.25
        )


@pytest.mark.parametrize("convex", [True, False])
def test_a_bent_curve_is_cut_where_it_bends(convex: bool) -> None:
    bend = 1 << 20
    slow, fast = 1e9, 4e9
    before, after = (fast, slow) if convex else (slow, fast)
    step = bend / before - bend / after
    truth = LinkLevel(
        name="truth",
        size=4,
        alpha=1e-4,
        bandwidth=1e9,
        scope="node",
        lines=(
            Line(alpha=2e-5, bandwidth=before, kind="broadcast", protocol="small", up_to=bend),
            Line(
                alpha=2e-5, launch=max(0.0, 2 * step), bandwidth=after, kind="broadcast", protocol="large", above=bend
            ),
        ),
    )
    samples = samples_of(cluster_of([truth]), random.Random(0), noise=0.01, outliers=0.0, kinds=("broadcast",))
    [lines] = fit_lines("broadcast", [(4, "node", samples)], "gloo")
    assert len(lines) > 1
    fitted = fit_cluster(Measurements(origin=origin(), collectives=samples, work=WORK), "fitted")
    rows = compared(fitted, Measurements(origin=origin(), collectives=samples, work=()))
    assert max(abs(row.error) for row in rows) < 0.15


WORK = work_of(device({"fp32": 5e10}, 8e9, 2e-5), random.Random(1), 0.02)


@pytest.mark.parametrize("seed", range(4))
def test_rates_are_recovered_from_noise(seed: int) -> None:
    rng = random.Random(seed)
    rates = {"fp32": 10 ** rng.uniform(10, 13), "bf16": 10 ** rng.uniform(10, 14)}
    # A roofline has both of its sides in the data only if products are not all bound by memory.
    truth = device(rates, max(rates.values()) / rng.uniform(5, 30), 10 ** rng.uniform(-6, -4.5))
    fitted, errors = fit_device(work_of(truth, rng, 0.05), origin())
    for dtype, rate in rates.items():
        assert fitted.peak(dtype) * fitted.efficiency == pytest.approx(rate, rel=0.15)
    assert fitted.memory_bandwidth == pytest.approx(truth.memory_bandwidth, rel=0.2)
    assert fitted.launch_seconds == pytest.approx(truth.launch_seconds, rel=0.2)
    assert sorted(errors)[len(errors) // 2] < 0.1


@pytest.mark.parametrize(("hosts", "per_host", "library"), [(1, 4, "gloo")])
def test_a_file_says_what_was_measured_on_every_level_and_comes_back_equal(
    tmp_path: Path, hosts: int, per_host: int, library: str
) -> None:
    scopes = [("network", hosts, 3e-5, 2e9), ("node", per_host, 5e-6, 2e10)]
    levels = [
        LinkLevel(name=scope, size=size, alpha=alpha, bandwidth=bandwidth, scope=scope)
        for scope, size, alpha, bandwidth in scopes
        if size > 1
    ]
    samples = samples_of(cluster_of(levels, library), random.Random(3), noise=0.03, outliers=0.0)
    late = tuple(
        late_of(size, 1e-3 * (number + 1), number)
        for number, (_, size, _, _) in enumerate(s for s in scopes if s[1] > 1)
    )
    measured = Measurements(origin=origin(hosts, per_host, library), collectives=samples, work=WORK, skew=late)
    cluster = fit_cluster(measured, 'a "quoted" name')
    assert [level.size for level in cluster.levels] == [level.size for level in levels]
    file = tmp_path / "cluster.toml"
    file.write_text(calibration_toml(cluster, measured))
    assert load_cluster(file) == cluster
    assert all(error < 0.1 for error in median_errors(compared(cluster, measured)).values())
    for word in ("2026-01-01", "torch 2.13", f"{hosts * per_host} ranks", library, "median error"):
        assert word in dict(cluster.levels[0].sources)["lines.0.alpha"]
    assert [level.skew for level in cluster.levels] == [pytest.approx(1e-3 * (s.level + 1)) for s in late]
    assert all("standard error" in dict(level.sources)["skew"] for level in cluster.levels)
    on_time = replace(cluster, levels=tuple(replace(level, skew=0.0) for level in cluster.levels))
    assert compared(cluster, measured) == compared(on_time, measured), "bare collectives do not wait"
    # Larger messages never take less, whatever the groups: also at the cuts between ranges.
    mesh, places = measuring_mesh([level.size for level in levels])
    for kind, place in itertools.product(KINDS, places):
        links = axis_links(cluster, mesh.shape, tuple(mesh.names.index(name) for name in place.axes))
        seconds = [collective_seconds(kind, 1.3**power, links)[0] for power in range(70)]
        assert seconds == sorted(seconds), (kind, place)


def test_a_plan_is_made_with_a_calibrated_file(tmp_path: Path) -> None:
    level = LinkLevel(name="l", size=4, alpha=1e-4, bandwidth=1e9, scope="node")
    four = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    samples = samples_of(cluster_of([level]), random.Random(5), noise=0.03, outliers=0.0, kinds=four)
    measured = Measurements(origin=origin(), collectives=samples, work=WORK)
    file = tmp_path / "cluster.toml"
    file.write_text(calibration_toml(fit_cluster(measured, "mine"), measured))

    class Loss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x).square().mean()

    made = plan(Loss(), torch.ones(8, 8), cluster=file, mesh="4", baseline="ddp", buckets=False)
    message = load_cluster(file)
    late = replace(message, levels=tuple(replace(level, skew=0.5) for level in message.levels))
    waiting = plan(Loss(), torch.ones(8, 8), cluster=late, mesh="4", baseline="ddp", buckets=False)
    waits = (waiting.estimate.seconds["all_reduce"] - made.estimate.seconds["all_reduce"]) / skew_seconds(
        axis_links(late, (4,), (0,))
    )
    assert waits == pytest.approx(round(waits)) and round(waits) > 0, "each collective waits once"
    # a timeline without overlap is the sum; it sends without buckets
    assert waiting.timeline().seconds == pytest.approx(waiting.estimate.alone_seconds)
    assert made.cluster == "mine"
    assert made.estimate.seconds["all_reduce"] > collective_seconds("all_reduce", 4, axis_links(message, (4,), (0,)))[0]


def test_groups_that_differ_by_more_than_hops_get_lines_of_their_own() -> None:
    """Pairs ten times faster than the ring of four says: no alpha and launch explain both."""
    samples = [
        CollectiveSample(
            kind="all_reduce", level=0, group_size=n, nbytes=nbytes, seconds=(1e-3 if n == 4 else 1e-4) + nbytes * 1e-9
        )
        for n in (2, 4)
        for nbytes in SIZES
    ]
    cluster = fit_cluster(Measurements(origin=origin(), collectives=tuple(samples), work=WORK), "c")
    assert {line.members for line in cluster.levels[0].lines} == {0, 2, 4}
    rows = compared(cluster, Measurements(origin=origin(), collectives=tuple(samples), work=()))
    assert max(abs(row.error) for row in rows) < 0.1
    chosen = cluster.levels[0].lines_of("ring", "all_reduce", 2)
    assert {line.members for line in chosen.values()} == {2}
    assert {line.members for line in cluster.levels[0].lines_of("ring", "all_reduce", 3).values()} == {0}
    assert {line.kind for line in cluster.levels[0].lines_of("ring", "reduce", 2).values()} == {""}


def test_a_file_with_ranges_that_leave_a_gap_is_refused() -> None:
    with pytest.raises(ClusterError, match="no line holds for messages above 10 bytes"):
        LinkLevel(
            name="l",
            size=2,
            alpha=0.0,
            bandwidth=1.0,
            lines=(Line(alpha=0.0, bandwidth=1.0, up_to=10), Line(alpha=0.0, bandwidth=1.0, above=20)),
        )
    with pytest.raises(ClusterError, match="enclose no message size"):
        Line(alpha=0.0, bandwidth=1.0, above=20, up_to=10)


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(MeshError, match=r"4 devices, but 2 processes.*start 4, or calibrate anew"):
        check_ranks(cluster_of([LinkLevel(name="l", size=4, alpha=0.0, bandwidth=1.0)]), 2)
    with pytest.raises(MeshError, match="levels of 4, but processes were started as 2 x 2"):
        check_ranks(cluster_of([LinkLevel(name="l", size=4, alpha=0.0, bandwidth=1.0)]), 4, (2, 2))
    for names in (("a", "a", "b"), ("a", "b", "a", "b")):
        with pytest.raises(MeshError, match="start equally many on each"):
            origin_of(names, date="", backend="gloo", torch_version="", device="cpu", memory_bytes=1)
    for wrong in ({"kinds": ("gossip",)}, {"dtypes": ()}, {"num_rounds": 0}, {"least_nbytes": 9, "most_nbytes": 8}):
        with pytest.raises(ArgumentError):
            Effort(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ClusterError, match="measure some of both"):
        fit_device([sample for sample in WORK if sample.flops], origin())


def test_a_gpu_is_known_by_its_preset() -> None:
    assert device_name("NVIDIA H100 80GB HBM3") == "h100"
    assert device_name("NVIDIA A100-SXM4-40GB") == "a100-40gb"
    assert device_name("NVIDIA GeForce RTX 2080 Ti") == "rtx2080ti"
    assert device_name("Something Else") == "Something Else"


def test_requests_are_refused_before_anything_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rich.console import Console

    console = Console(quiet=True)
    monkeypatch.delenv("RANK", raising=False)
    for wrong in ({}, {"out": tmp_path / "a.toml", "check": tmp_path / "a.toml"}):
        with pytest.raises(ArgumentError, match="one of them"):
            CalibrationRequest(**wrong)
    with pytest.raises(ArgumentError, match="tolerance"):
        CalibrationRequest(check=tmp_path / "a.toml", tolerance=0.0)
    with pytest.raises(MeshError, match="no process group"):
        run(CalibrationRequest(out=tmp_path / "a.toml"), console)
    with pytest.raises(ClusterError, match="cannot be read"):
        run(CalibrationRequest(check=tmp_path / "missing.toml", processes=2), console)
    (tmp_path / "bad.toml").write_text("name = ")
    with pytest.raises(ClusterError, match="not TOML"):
        run(CalibrationRequest(check=tmp_path / "bad.toml", processes=2), console)
    with pytest.raises(ClusterError, match=r"must end in \.toml"):
        check_writable(tmp_path / "a.json")
    with pytest.raises(ClusterError, match="make it first"):
        check_writable(tmp_path / "none" / "a.toml")
    with pytest.raises(MeshError, match="no process group"):
        measure(Effort(), lambda _: None)


TINY = Effort(most_nbytes=4096, num_sizes=2, num_rounds=1, dtypes=("fp32",))


def _measured() -> Measurements:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measure_steps, "STEPS", {"cpu": STEPS["cpu"][:2]})
        patch.setattr(timing, "SAMPLE_SECONDS", 1e-3)
        return measure(TINY, lambda _: None)


def _measured_unlike() -> str:
    import torch.distributed as dist

    try:
        measure(Effort(num_rounds=1 + dist.get_rank()), lambda _: None)
    except RankError as error:
        return str(error)
    return ""


def test_real_processes_measure_the_same_values_on_every_rank() -> None:
    first, second = ranks(2).run(_measured)
    assert first == second
    assert {(s.kind, s.group_size) for s in first.collectives} == {(kind, 2) for kind in KINDS}
    assert {(s.level, s.group_size) for s in first.skew} == {(0, 2)} and all(s.compute_seconds > 0 for s in first.skew)
    assert first.origin.level_sizes == (2,) and first.origin.backend == "gloo"
    cluster = fit_cluster(first, "two")
    assert cluster.num_devices == 2
    assert all(row.predicted > 0 for row in compared(cluster, first))


def test_ranks_that_were_asked_for_different_things_all_say_so() -> None:
    for said in ranks(2).run(_measured_unlike):
        assert "num_rounds: 1 on ranks [0], 2 on ranks [1]" in said


def _dies(tell: object) -> None:
    import os

    import torch.distributed as dist

    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def _refuses(tell: object) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        raise ArgumentError("rank 1 says no")
    dist.barrier()


def _hangs(tell: object) -> None:
    import torch.distributed as dist

    if dist.get_rank() == 1:
        time.sleep(3600)
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    time.sleep(3600)


def test_a_rank_that_fails_ends_the_run() -> None:
    with pytest.raises(RankError, match=r"rank 1 of 2 died|failed"):
        on_processes(_dies, num_processes=2, timeout_seconds=60)
    with pytest.raises(ArgumentError, match="rank 1 says no"):
        on_processes(_refuses, num_processes=2, timeout_seconds=60)


def test_a_rank_that_hangs_ends_the_run_in_time() -> None:
    with pytest.raises(RankError, match="took longer than 3 s"):
        on_processes(_hangs, num_processes=2, timeout_seconds=3)
