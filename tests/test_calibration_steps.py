"""Calibration by whole steps: what launches and bytes take in them is found, and planning counts it."""

import math
import random
from dataclasses import replace

import pytest
import torch

import autopar.calibration.fit_steps as fitting
from autopar.calibration import measure_work, reference_steps
from autopar.calibration.check import compared, median_errors
from autopar.calibration.fit import fit_cluster
from autopar.calibration.fit_device import with_attention
from autopar.calibration.fit_steps import fit_steps
from autopar.calibration.predict import predicted_work
from autopar.calibration.reference_steps import STEPS, predicted_step, training_step
from autopar.calibration.samples import Measurements, StepSample, WorkSample
from autopar.ops.recompute import ReplayedCall
from autopar.values.cluster import load_cluster
from autopar.values.device import Device
from autopar.values.link import LinkLevel
from tests.test_calibration import WORK, cluster_of, device, origin, samples_of

FACTORS = ("launch_in_step", "bytes_in_step", "flops_in_step", "optimizer_bytes", "replay_launches")


def steps_of(truth: Device, device_type: str) -> tuple[StepSample, ...]:
    """Steps of which a kind of device's factors are found, as long as they would be with the true ones."""
    return tuple(
        StepSample(batch=batch, size=size, kind=kind, seconds=predicted_step(truth, batch, size, kind))
        for size, batch, kind in STEPS[device_type]
    )


OWN = replace(device({"fp32": 5e10}, 8e9, 2e-5), name="cpu")  # of WORK too


def truly(*factors: float) -> Device:
    return replace(OWN, **dict(zip(FACTORS, factors, strict=True)))


@pytest.mark.parametrize("truth", [truly(2.1, 4.2, 1.1, 0.3, 1.0), truly(2.5, 0.3, 1.4, 3.0, 2.5)])
def test_factors_within_a_step_are_recovered(monkeypatch: pytest.MonkeyPatch, truth: Device) -> None:
    monkeypatch.setattr(fitting, "WEIGHT", 1e-3)
    fitted = fit_steps(OWN, steps_of(truth, "cpu"), origin())
    for field in FACTORS:
        assert getattr(fitted, field) == pytest.approx(getattr(truth, field), rel=0.08)
        assert "8 samples, in pieces, took" in dict(fitted.sources)[field]


def test_factors_explain_steps_and_leave_operations_alone() -> None:
    steps = steps_of(truly(2.1, 2.5, 1.1, 0.5, 1.0), "cpu")
    whole = fit_steps(OWN, tuple(step for step in steps if step.kind == "whole"), origin())
    for field in FACTORS[2:]:
        assert getattr(whole, field) == getattr(OWN, field) and field not in dict(whole.sources), "nothing says it"
    samples = samples_of(
        cluster_of([LinkLevel(name="l", size=4, alpha=1e-4, bandwidth=1e9)]), random.Random(7), 0.0, 0.0
    )
    measured = Measurements(origin=origin(), collectives=samples, work=WORK, steps=steps)
    cluster = fit_cluster(measured, "c")
    for step in steps:
        assert predicted_step(cluster.device, step.batch, kind=step.kind) == pytest.approx(step.seconds, rel=0.03)
    errors = median_errors(compared(cluster, measured))
    assert errors["steps"] < 0.02 and errors["memory-bound"] < 0.1, "steps by the factors, operations alone without"


@pytest.mark.parametrize(("launch", "nbytes"), [(2.0, 1.4), (1.0, 1.05)])
def test_factors_are_recovered_of_the_steps_of_a_gpu(launch: float, nbytes: float) -> None:
    own = device({"bf16": 7e14}, 4e12, 2e-6)
    truth = replace(own, launch_in_step=launch, bytes_in_step=nbytes)
    steps = steps_of(truth, "cuda")
    fitted = fit_steps(own, steps, origin(backend="cpu:gloo,cuda:nccl"))
    for step in steps:
        assert predicted_step(fitted, step.batch, step.size) == pytest.approx(step.seconds, rel=0.01)
    assert fitted.bytes_in_step == pytest.approx(nbytes, rel=0.1)


def test_a_step_runs_again_what_its_price_says_and_the_update_is_what_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replayed: list[str] = []
    replay = ReplayedCall.replay

    def noted(call: ReplayedCall) -> None:
        replayed.append(str(call.function))
        replay(call)

    monkeypatch.setattr(ReplayedCall, "replay", noted)
    program, _ = reference_steps.planned(2, "small")
    training_step(2, "small", torch.device("cpu"), "run again")()
    names = reference_steps.run_again(program)
    assert len(replayed) == len(names) == 2 * 12
    replayed.clear()
    training_step(2, "small", torch.device("cpu"))()
    assert not replayed
    own, slower = OWN, replace(OWN, optimizer_bytes=3.0)
    assert predicted_step(own, 2) < predicted_step(slower, 2)
    without = predicted_step(slower, 2, kind="no update")
    assert without == pytest.approx(predicted_step(own, 2, kind="no update"))
    dearer = replace(own, replay_launches=5.0)
    more = predicted_step(dearer, 2, kind="run again") - predicted_step(own, 2, kind="run again")
    assert more == pytest.approx(3 * len(names) * own.launch_seconds)


@pytest.mark.parametrize(
    ("kind", "always", "per_head", "per_key"),
    [
        *(("cuda", 0.6, 74.0, 480.0), ("cuda", 0.5, 150.0, 50.0), ("cuda", 1.3, 30.0, 900.0)),
        *(("cpu", 0.7, 21.0, 75.0), ("cpu", 0.5, 40.0, 20.0)),
    ],
)
def test_attention_is_recovered_by_the_size_of_its_heads(
    kind: str, always: float, per_head: float, per_key: float
) -> None:
    dtype, nbytes_each = {"cuda": ("bf16", 2.0), "cpu": ("fp32", 4.0)}[kind]
    own = replace(device({dtype: 6e14}, 4e12, 2e-6) if kind == "cuda" else device({dtype: 6e10}, 7e9, 2e-5), name=kind)
    slower = replace(own, attention=always, attention_per_head=per_head, attention_per_key=per_key)
    truth = replace(load_cluster("1xcpu"), device=slower)
    samples = []
    for size in measure_work.ATTENTIONS[kind]:
        nbytes = nbytes_each * math.prod(size)
        sample = WorkSample(
            name="attention", dtype=dtype, attention=size, nbytes=4 * nbytes, backward_nbytes=8 * nbytes, seconds=1.0
        )
        samples.append(replace(sample, seconds=predicted_work(truth, sample)))
    fitted = with_attention(own, samples, origin())
    assert fitted.attention == pytest.approx(always, rel=0.02)
    assert fitted.attention_per_head == pytest.approx(per_head, rel=0.05)
    assert fitted.attention_per_key == pytest.approx(per_key, rel=0.05)
    heads = {"cuda": "64 and 128", "cpu": "16 and 32 and 64 and 128"}[kind]
    assert f"attention with heads of {heads}" in dict(fitted.sources)["attention"]
