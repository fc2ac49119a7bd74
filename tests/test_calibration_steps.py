"""Calibration by whole steps: what launches and bytes take in them is found, and planning counts it."""

import random
from dataclasses import replace

import pytest

import autopar.calibration.fit_steps as fitting
from autopar.calibration.check import compared, median_errors
from autopar.calibration.fit import fit_cluster
from autopar.calibration.fit_steps import fit_steps
from autopar.calibration.reference_steps import BATCHES, predicted_step
from autopar.calibration.samples import Measurements, StepSample
from autopar.link import LinkLevel
from tests.test_calibration import WORK, cluster_of, device, origin, samples_of


@pytest.mark.parametrize(("launch", "nbytes"), [(1.0, 1.0), (2.1, 4.2), (0.8, 2.5), (1.7, 1.0)])
def test_factors_within_a_step_are_recovered_and_explain_the_steps(
    monkeypatch: pytest.MonkeyPatch, launch: float, nbytes: float
) -> None:
    own = device({"fp32": 5e10}, 8e9, 2e-5)  # of WORK too
    truth = replace(own, launch_in_step=launch, bytes_in_step=nbytes)
    steps = tuple(StepSample(batch=batch, seconds=predicted_step(truth, batch)) for batch in BATCHES)
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
