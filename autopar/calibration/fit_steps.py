"""How much more do launches, bytes and flops take within a training step than alone? Factors that make it right.

    seconds = sum over ops and passes of max(flops_in_step flops / (peak efficiency), bytes_in_step nbytes / bandwidth)
                                         + launch_in_step launch
              + optimizer_bytes bytes_in_step nbytes / bandwidth and launches, of the optimizer
              + replay_launches launch_in_step launch of each call that is run again

with all else fitted to operations alone. Steps of few samples are launches more than flops and bytes, those of many the
reverse; what the optimizer takes, and what it takes to run calls again, steps without and with them say. The factors
minimise the squares of log errors (SciPy), and weakly of their own logs, over what they are unless calibrated: steps
are measured to some percent, and where either of two factors explains them neither should go far. What takes the
longer of flops and bytes has more than one minimum: the least of those from several starts counts.
"""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
from scipy.optimize import OptimizeResult, least_squares

from autopar.calibration.reference_steps import predicted_step
from autopar.calibration.samples import Origin, StepSample
from autopar.report.units import seconds_text
from autopar.values.cluster import CALIBRATED
from autopar.values.device import Device

FACTORS = {
    "launch_in_step": "whole", "bytes_in_step": "whole", "flops_in_step": "no update", "optimizer_bytes": "no update",
    "replay_launches": "run again"
}  # fmt: skip
"""Factors, and the kinds of step without which nothing says what they are."""

STARTS = (1.0, 1.0), (1.0, 3.0), (3.0, 0.5)
"""Of launches and bytes."""

WEIGHT = 0.02
"""Of a factor's log, beside a step's log error."""


def fit_steps(device: Device, samples: Sequence[StepSample], origin: Origin) -> Device:
    """The device with the factors for which the steps take as long as was measured."""

    kinds = {sample.kind for sample in samples}
    fields = [field for field, kind in FACTORS.items() if kind in kinds]

    def with_factors(logs: npt.NDArray[np.float64]) -> Device:
        factors = dict(zip(fields, np.exp(logs).tolist(), strict=True))
        return replace(device, **{field: factor * CALIBRATED[field] for field, factor in factors.items()})

    def errors(logs: npt.NDArray[np.float64]) -> list[float]:
        own = with_factors(logs)
        own_errors = [math.log(predicted_step(own, s.batch, s.size, s.kind) / s.seconds) for s in samples]
        return [*own_errors, *(WEIGHT * logs).tolist()]

    def answer(launch: float, nbytes: float) -> OptimizeResult:
        start = [math.log(launch), math.log(nbytes), *[0.0] * (len(fields) - 2)]
        return least_squares(errors, start, diff_step=1e-3)

    best = min((answer(*starts) for starts in STARTS), key=lambda found: float(found.cost))
    fitted = with_factors(best.x)
    said = "; ".join(
        f"{s.size}, {s.batch} samples, {s.kind}, took {seconds_text(s.seconds)}, operations alone explain "
        f"{seconds_text(predicted_step(device, s.batch, s.size, s.kind))}, with the factors "
        f"{seconds_text(predicted_step(fitted, s.batch, s.size, s.kind))}"
        for s in samples
    )
    source = f"{origin}: training steps of decoders: {said}"
    return replace(fitted, sources=(*device.sources, *((field, source) for field in fields)))
