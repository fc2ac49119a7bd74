"""Calibration by whole steps: what launches and bytes take in them is found, and planning counts it."""

import math
import random
from dataclasses import replace

import pytest

import autopar.calibration.fit_steps as fitting
from autopar.calibration import measure_work
from autopar.calibration.check import compared, median_errors
from autopar.calibration.fit import fit_cluster
from autopar.calibration.fit_device import with_attention
from autopar.calibration.fit_steps import fit_steps
from autopar.calibration.predict import predicted_work
from autopar.calibration.reference_steps import STEPS, predicted_step
from autopar.calibration.samples import Measurements, StepSample, WorkSample
from autopar.cluster import load_cluster
from autopar.link import LinkLevel
from tests.test_calibration import WORK, cluster_of, device, origin, samples_of


@pytest.mark.parametrize(("launch", "nbytes"), [(1.0, 1.0), (2.1, 4.2), (0.8, 2.5), (1.7, 1.0)])
def test_factors_within_a_step_are_recovered_and_explain_the_steps(
    monkeypatch: pytest.MonkeyPatch, launch: float, nbytes: float
) -> None:
    own = device({"fp32": 5e10}, 8e9, 2e-5)  # of WORK too
    truth = replace(own, launch_in_step=launch, bytes_in_step=nbytes)
    steps = tuple(StepSample(batch=batch, seconds=predicted_step(truth, batch)) for _, batch in STEPS["cpu"])
    with monkeypatch.context() as exact:
        exact.setattr(fitting, "WEIGHT", 1e-3)
        fitted = fit_steps(own, steps, origin())
        assert fitted.launch_in_step == pytest.approx(launch, rel=0.02)
        assert fitted.bytes_in_step == pytest.approx(nbytes, rel=0.02)
    fitted = fit_steps(own, steps, origin())
    for step in steps:
        assert predicted_step(fitted, step.batch) == pytest.approx(step.seconds, rel=0.01)
    samples = samples_of(
        cluster_of([LinkLevel(name="l", size=4, alpha=1e-4, bandwidth=1e9)]), random.Random(7), 0.0, 0.0
    )
    measured = Measurements(origin=origin(), collectives=samples, work=WORK, steps=steps)
    cluster = fit_cluster(measured, "c")
    errors = median_errors(compared(cluster, measured))
    assert errors["steps"] < 0.02 and errors["memory-bound"] < 0.1, "steps by the factors, operations alone without"


@pytest.mark.parametrize(("launch", "nbytes"), [(2.0, 1.4), (1.0, 1.05)])
def test_factors_are_recovered_of_the_steps_of_a_gpu(launch: float, nbytes: float) -> None:
    own = device({"bf16": 7e14}, 4e12, 2e-6)
    truth = replace(own, launch_in_step=launch, bytes_in_step=nbytes)
    steps = tuple(
        StepSample(batch=batch, size=size, seconds=predicted_step(truth, batch, size)) for size, batch in STEPS["cuda"]
    )
    fitted = fit_steps(own, steps, origin(backend="cpu:gloo,cuda:nccl"))
    for step in steps:
        assert predicted_step(fitted, step.batch, step.size) == pytest.approx(step.seconds, rel=0.01)
    assert fitted.bytes_in_step == pytest.approx(nbytes, rel=0.1)


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
