"""How much more do launches and bytes take within a training step than alone? Factors that make predictions right.

    seconds = sum over ops and passes of max(flops / (peak efficiency), bytes_in_step nbytes / bandwidth)
              + launch_in_step launch

with all else fitted to operations alone. Steps of few samples are launches more than bytes, those of many the reverse.
The factors minimise the squares of log errors (SciPy), and weakly of their own logs: steps are measured to some
percent, and where either factor explains them neither should go far.
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


def fit_steps(device: Device, samples: Sequence[StepSample], origin: Origin) -> Device:
    """The device with the factors for which the steps take as long as was measured."""

    def with_factors(logs: npt.NDArray[np.float64]) -> Device:
        launch, nbytes = np.exp(logs).tolist()
        return replace(device, launch_in_step=launch, bytes_in_step=nbytes)

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
    return replace(fitted, sources=(*device.sources, ("launch_in_step", source), ("bytes_in_step", source)))
