"""How much more do launches and bytes take within a training step than alone? Factors that make predictions right.

    seconds = sum over ops and passes of
        max(max(flops / (peak efficiency), bytes_in_step nbytes / bandwidth) + launch_in_step launch, host)

with all else fitted to operations alone. Steps of few samples are launches more than bytes, those of many the reverse.
Where Python computes itself the factors are of launches and bytes; a device that it launches on takes its launches in
a step as alone, and what is found beside the bytes' factor is `host`, of a step that has too little work for the
device. Both minimise the squares of log errors (SciPy), and weakly of their own logs: steps are measured to some
percent, and where either explains them neither should go far.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from autopar.calibration.reference_steps import predicted_step
from autopar.calibration.samples import Origin, StepSample
from autopar.device import Device
from autopar.report.units import seconds_text

WEIGHT = 0.02
"""Of a factor's log, beside a step's log error."""

HOST_SECONDS = 1e-5
"""The order of what a host takes to launch an operation: where the search for it begins."""


def fit_steps(device: Device, samples: Sequence[StepSample], origin: Origin) -> Device:
    """The device with the factors for which the steps take as long as was measured."""

    launches = "host_seconds" if any(s.size == "large" for s in samples) else "launch_in_step"

    def with_factors(logs: npt.NDArray[np.float64]) -> Device:
        launch, nbytes = np.exp(logs).tolist()
        first = launch * HOST_SECONDS if launches == "host_seconds" else launch
        return replace(device, bytes_in_step=nbytes, **{launches: first})

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        own = with_factors(logs)
        own_errors = [math.log(predicted_step(own, s.batch, s.size) / s.seconds) for s in samples]
        return [*own_errors, *(WEIGHT * logs).tolist()]

    fitted = with_factors(least_squares(errors, [0.0, 0.0], diff_step=1e-3).x)
    said = "; ".join(
        f"{s.size}, {s.batch} samples took {seconds_text(s.seconds)}, operations alone explain "
        f"{seconds_text(predicted_step(device, s.batch, s.size))}, with the factors "
        f"{seconds_text(predicted_step(fitted, s.batch, s.size))}"
        for s in samples
    )
    source = f"{origin}: training steps of decoders: {said}"
    return replace(fitted, sources=(*device.sources, (launches, source), ("bytes_in_step", source)))
